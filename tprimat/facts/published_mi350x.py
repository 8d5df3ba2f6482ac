"""Training runs of the MI350X suite's page: single GPU, data parallel, and Qwen3 8B with torchtune."""

from dataclasses import replace

from tprimat.facts.published import PublishedResult

PAGE = "AMD MI350X Training Benchmark Results"
DATE = "2026-01"
ACCELERATOR = "AMD Instinct MI350X"


def _suite(size: str, sequence: int, batch: int, tokens_per_second: float, teraflops: float) -> PublishedResult:
    """Benchmark 3: one GPU. The page does not say in which dtype the transformers trained."""
    return PublishedResult(
        name=f"mi350x-gpt-{size}",
        source=f"{PAGE}, benchmark 3",
        date=DATE,
        engine="pytorch",
        accelerator=ACCELERATOR,
        gpus=1,
        model=f"GPT {size}",
        shape=f"gpt-{size}",
        dtype=None,
        sequence_tokens=sequence,
        micro_batch_sequences=batch,
        global_batch_sequences=batch,
        tokens_per_second_per_gpu=tokens_per_second,
        flops_per_second_per_gpu=teraflops * 1e12,
        convention="6n",
    )


def _data_parallel(size: str, gpus: int, tokens_per_second: float, teraflops: float, notes: str | None = None) -> PublishedResult:
    """Benchmark 4: 8 sequences a GPU; the page prints rates of all GPUs together."""
    return replace(
        _suite(size, 1024, 8, tokens_per_second / gpus, teraflops / gpus),
        name=f"mi350x-ddp{gpus}-gpt-{size}" + ("-scaling" if notes else ""),
        source=f"{PAGE}, benchmark 4",
        gpus=gpus,
        global_batch_sequences=8 * gpus,
        notes=notes,
    )


QWEN3 = PublishedResult(
    name="mi350x-qwen3-8b-bf16",
    source=f"{PAGE}, benchmark 5",
    date=DATE,
    engine="torchtune",
    accelerator=ACCELERATOR,
    gpus=8,
    model="Qwen3-8B",
    shape="qwen3-8b",
    dtype="bf16",
    sequence_tokens=8192,
    micro_batch_sequences=14,
    tokens_per_second_per_gpu=14471,
    notes="full fine-tuning, activation checkpointing; torchtune counts tokens that carry loss",
)
SCALING = "scaling test"

MI350X_RESULTS: tuple[PublishedResult, ...] = (
    _suite("30m", 512, 32, 950586, 171.8),
    _suite("124m", 512, 16, 298957, 222.4),
    _suite("354m", 512, 8, 107626, 228.7),
    _suite("773m", 512, 4, 40054, 185.8),
    _suite("1.5b", 512, 4, 24195, 208.6),
    _suite("3b", 512, 2, 11980, 190.3),
    _suite("7b", 1024, 8, 18381, 578.3),
    _suite("13b", 1024, 4, 7941, 482.2),
    _data_parallel("7b", 8, 101124, 3182),
    _data_parallel("13b", 8, 50595, 3072),
    _data_parallel("7b", 1, 18324, 577, SCALING),
    _data_parallel("7b", 2, 28451, 895, SCALING),
    _data_parallel("7b", 4, 62813, 1976, SCALING),
    _data_parallel("7b", 8, 70763, 2226, f"{SCALING}; the page's other table has 101,124 tokens/s for the same row"),
    QWEN3,
    replace(QWEN3, name="mi350x-qwen3-8b-fp8", dtype="fp8", tokens_per_second_per_gpu=20497),
)
