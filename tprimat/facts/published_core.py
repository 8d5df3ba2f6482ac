"""What a page about Megatron-Core's performance prints of training speed, and the paper behind one of its rows."""

from dataclasses import replace

from tprimat.facts.published import PublishedResult
from tprimat.facts.published_sizes import CORE_PAGE

H100 = "NVIDIA H100 80GB HBM3"
LLAMA_PAPER = "arXiv 2407.21783, table 4"
WEAK_SCALING = (
    ("7B", "llama-2-7b", 8, 0.42, "its weak-scaling table names a size only, taken as Llama 2's"),
    ("70B", "llama-3-70b", 64, 0.44, "its weak-scaling table"),
    ("175B", "gpt-3-175b", 512, 0.45, "its weak-scaling table; 47 % elsewhere on the page"),
    ("405B", "llama-3.1-405b", 1024, 0.46, "its weak-scaling table; 400 TFLOP/s elsewhere on the page would be 40 %"),
    ("462B", "gpt-462b", 6144, 0.47, "its weak-scaling table"),
)
"""Size, shape, GPUs, MFU; no throughput stands beside them."""

CORE_GPT3 = PublishedResult(
    name="core-page-gpt-3-175b",
    source=CORE_PAGE,
    date=None,
    engine="megatron",
    accelerator=H100,
    gpus=512,
    model="GPT-3 175B",
    shape="gpt-3-175b",
    dtype="bf16",
    sequence_tokens=2048,
    tensor_parallel=4,
    pipeline_parallel=8,
    flops_per_second_per_gpu=390e12,
    mfu=0.47,
)
LLAMA_405B = PublishedResult(
    name="llama-3.1-405b-16k-gpus",
    source=LLAMA_PAPER,
    date="2024-07",
    engine=None,
    accelerator=H100,
    gpus=16384,
    model="Llama 3.1 405B",
    shape="llama-3.1-405b",
    dtype="bf16",
    sequence_tokens=8192,
    tensor_parallel=8,
    pipeline_parallel=16,
    context_parallel=1,
    global_batch_sequences=2048,
    flops_per_second_per_gpu=400e12,
    mfu=0.41,
)
CORE = (
    CORE_GPT3,
    replace(
        CORE_GPT3,
        name="core-page-gpt-3-175b-example",
        global_batch_sequences=1536,
        tokens_per_second_per_gpu=1536 * 2048 / 5 / 512,
        flops_per_second_per_gpu=None,
        mfu=None,
        notes="its worked example: about 5 s a step on 512 GPUs; more than the chip's peak, so it cannot hold",
    ),
    replace(
        CORE_GPT3,
        name="core-page-gpt-462b",
        gpus=6144,
        model="GPT-462B",
        shape="gpt-462b",
        sequence_tokens=4096,
        tensor_parallel=None,
        pipeline_parallel=None,
    ),
    LLAMA_405B,
    replace(LLAMA_405B, name="llama-3.1-405b-8k-gpus", gpus=8192, flops_per_second_per_gpu=430e12, mfu=0.43),
    *(
        PublishedResult(
            name=f"core-page-weak-scaling-{shape}",
            source=CORE_PAGE,
            date=None,
            engine="megatron",
            accelerator=H100,
            gpus=gpus,
            model=size,
            shape=shape,
            dtype="bf16",
            mfu=mfu,
            notes=notes,
        )
        for size, shape, gpus, mfu, notes in WEAK_SCALING
    ),
)
