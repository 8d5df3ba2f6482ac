"""The published training runs, all in RESULTS. Figures as printed; what we make of them is published.rebase."""

from dataclasses import replace

from tprimat.facts.published import PublishedResult
from tprimat.facts.published_core import CORE
from tprimat.facts.published_mi350x import MI350X_RESULTS

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"
MI300X = "AMD Instinct MI300X"

TPRIMAT_GUIDE = "TPrimat peak throughput guide"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM images/model_table.png"

DGX_CLOUD = PublishedResult(
    name="dgx-cloud-llama-3.1-8b-bf16",
    source="NVIDIA DGX Cloud benchmarking recipes, v25.02",
    date="2025-02",
    engine="nemo",
    accelerator=H100,
    gpus=8,
    model="Llama 3.1 8B",
    shape="llama-3.1-8b",
    dtype="bf16",
    sequence_tokens=8192,
    micro_batch_sequences=1,
    global_batch_sequences=128,
    tensor_parallel=1,
    context_parallel=2,
    tokens_per_second_per_gpu=10254,
    mfu=0.5999,
    convention="full",
)
TORCHTITAN = PublishedResult(
    name="torchtitan-llama-3.1-8b-eager",
    source="https://github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md",
    date="2024-12",
    engine="torchtitan",
    accelerator=None,
    gpus=8,
    model="Llama 3.1 8B",
    shape="llama-3.1-8b",
    dtype="bf16",
    sequence_tokens=8192,
    micro_batch_sequences=2,
    global_batch_sequences=16,
    tokens_per_second_per_gpu=5762,
    notes="H100 with 96 GB HBM2e at 500 W, whose peak its users do not know; selective recomputation; at step 90",
)
TORCHAO = PublishedResult(
    name="torchao-llama-3-8b-mi300x-bf16",
    source="torchao documentation, float8 training benchmarks on MI300X",
    date=None,
    engine="torchtitan",
    accelerator=MI300X,
    gpus=8,
    model="Llama 3 8B",
    shape="llama-3-8b",
    dtype="bf16",
    sequence_tokens=8192,
    tokens_per_second_per_gpu=5377,
)

PEERS = (
    DGX_CLOUD,
    replace(
        DGX_CLOUD,
        name="dgx-cloud-llama-3.1-8b-fp8",
        dtype="fp8",
        tokens_per_second_per_gpu=13882,
        mfu=0.4059,
        peak_flops=1979e12,
    ),
    PublishedResult(
        name="megatron-bridge-llama-3-8b-fp8",
        source="https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html, 25.11",
        date="2025-11",
        engine="megatron-bridge",
        accelerator=H100,
        gpus=8,
        model="Llama 3 8B",
        shape="llama-3-8b",
        dtype="fp8",
        sequence_tokens=8192,
        micro_batch_sequences=1,
        global_batch_sequences=128,
        tokens_per_second_per_gpu=14451,
        flops_per_second_per_gpu=744e12,
        convention="causal",
        notes="current scaling, FSDP",
    ),
    TORCHTITAN,
    replace(TORCHTITAN, name="torchtitan-llama-3.1-8b-compiled", tokens_per_second_per_gpu=6667),
    replace(TORCHTITAN, name="torchtitan-llama-3.1-8b-float8", dtype="fp8", tokens_per_second_per_gpu=8532),
    PublishedResult(
        name="torchtitan-llama-3.1-8b-h200-float8",
        source="https://github.com/pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
        date="2025-06",
        engine="torchtitan",
        accelerator=H200,
        gpus=32,
        model="Llama 3.1 8B",
        shape="llama-3.1-8b",
        dtype="fp8",
        sequence_tokens=8192,
        micro_batch_sequences=2,
        tokens_per_second_per_gpu=10938,
        notes="at step 100",
    ),
    PublishedResult(
        name="llm-foundry-mpt-7b",
        source="https://github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md",
        date=None,
        engine="llm-foundry",
        accelerator=H100,
        gpus=8,
        model="MPT 7B",
        shape=None,
        dtype="bf16",
        sequence_tokens=2048,
        micro_batch_sequences=6,
        global_batch_sequences=48,
        tokens_per_second_per_gpu=10643,
        flops_per_second_per_gpu=459.5096e12,
        mfu=0.4644,
        convention="full",
    ),
    TORCHAO,
    replace(TORCHAO, name="torchao-llama-3-8b-mi300x-fp8", dtype="fp8", tokens_per_second_per_gpu=6166),
)

SEED_H100 = PublishedResult(
    name="tprimat-h100-llama",
    source=TPRIMAT_GUIDE,
    date=None,
    engine="nemo",
    accelerator=H100,
    gpus=8,
    model="Llama 3.1 8B",
    shape="llama-3.1-8b",
    dtype="bf16",
    sequence_tokens=2048,
    global_batch_sequences=128,
    tokens_per_second_per_gpu=59175 / 8,
    flops_per_second_per_gpu=2840e12 / 8,
    mfu=0.179,
    convention="6n",
    peak_flops=1979e12,
    notes="6n with sizes rounded to 8.0 and 7.6 billion; sparse peak; fp8 was asked for, bf16 most likely ran",
)
SEED_MI300X = replace(
    SEED_H100,
    name="tprimat-mi300x-llama",
    engine="primus",
    accelerator=MI300X,
    sequence_tokens=8192,
    tokens_per_second_per_gpu=68875 / 8,
    flops_per_second_per_gpu=3306e12 / 8,
    mfu=0.316,
    peak_flops=1307e12,
    notes="sequence from 68,875 tokens/s x 15.22 s / 128; printed beside runs with 2,048 tokens: not comparable",
)
SEEDS = (
    SEED_H100,
    replace(
        SEED_H100,
        name="tprimat-h100-qwen",
        model="Qwen 2.5 7B",
        shape="qwen-2.5-7b",
        tokens_per_second_per_gpu=78877 / 8,
        flops_per_second_per_gpu=3597e12 / 8,
        mfu=0.227,
    ),
    SEED_MI300X,
    replace(
        SEED_MI300X,
        name="tprimat-mi300x-qwen",
        model="Qwen 2.5 7B",
        shape="qwen-2.5-7b",
        sequence_tokens=2048,
        global_batch_sequences=640,
        tokens_per_second_per_gpu=87933 / 8,
        flops_per_second_per_gpu=4010e12 / 8,
        mfu=0.383,
        notes="global batch from 87,933 tokens/s x 14.91 s / 2,048; printed beside runs with 128 sequences: not comparable",
    ),
)


def _megatron(size: str, gpus: int, split: tuple[int, int], teraflops: float, mfu: float) -> PublishedResult:
    """A row of Megatron-LM's weak scaling table; at its date the code counted the whole square (training.py, f2e5db402c)."""
    return PublishedResult(
        name=f"megatron-{size.lower()}",
        source=MEGATRON,
        date="2024-07",
        engine="megatron",
        accelerator=H100,
        gpus=gpus,
        model=f"GPT {size}",
        shape="gpt-462b" if size == "462B" else None,
        dtype="bf16",
        sequence_tokens=4096,
        global_batch_sequences=gpus // 2 if gpus >= 768 else 192,
        tensor_parallel=split[0],
        pipeline_parallel=split[1],
        flops_per_second_per_gpu=teraflops * 1e12,
        mfu=mfu,
        convention="full",
    )


MEGATRON_WEAK_SCALING = (
    _megatron("1.7B", 48, (1, 1), 408.8, 0.41),
    _megatron("7.1B", 96, (2, 1), 465.9, 0.47),
    _megatron("16B", 192, (4, 1), 489.1, 0.49),
    _megatron("32B", 384, (8, 1), 459.6, 0.46),
    _megatron("70B", 768, (8, 2), 419.7, 0.42),
    _megatron("119B", 1536, (8, 4), 420.5, 0.43),
    _megatron("177B", 2304, (8, 6), 432.8, 0.44),
    _megatron("314B", 3072, (8, 8), 474.4, 0.48),
    _megatron("462B", 6144, (8, 16), 459.9, 0.47),
)
RESULTS: tuple[PublishedResult, ...] = (*PEERS, *SEEDS, *CORE, *MEGATRON_WEAK_SCALING, *MI350X_RESULTS)
