"""Parameter counts as sources print them, to hold against our own."""

from tprimat.facts.published import PublishedHardware, PublishedSize, PublishedWeights

CORE_PAGE = "Megatron-Core performance benchmarks page"
DEEPSEEK_WEIGHTS = "github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md"
SUITE = "AMD MI350X Training Benchmark Results"

SIZES: tuple[PublishedSize, ...] = (
    PublishedSize(shape="llama-3.1-8b", source="huggingface.co/meta-llama/Llama-3.1-8B, safetensors", total=8_030_261_248),
    PublishedSize(shape="llama-2-7b", source="huggingface.co/meta-llama/Llama-2-7b-hf, safetensors", total=6.74e9),
    PublishedSize(shape="llama-2-13b", source="huggingface.co/meta-llama/Llama-2-13b-hf, safetensors", total=13.0e9),
    PublishedSize(shape="llama-3-70b", source="huggingface.co/meta-llama/Meta-Llama-3-70B, safetensors", total=70_553_706_496),
    PublishedSize(shape="llama-3.1-405b", source="arXiv 2407.21783", total=405e9),
    PublishedSize(shape="qwen-2.5-7b", source="huggingface.co/Qwen/Qwen2.5-7B, safetensors", total=7_615_616_512),
    PublishedSize(shape="qwen-2.5-32b", source="huggingface.co/Qwen/Qwen2.5-32B, safetensors", total=32_763_876_352),
    PublishedSize(shape="qwen-2.5-72b", source="huggingface.co/Qwen/Qwen2.5-72B, model card", total=72.7e9),
    PublishedSize(shape="qwen3-8b", source="huggingface.co/Qwen/Qwen3-8B, model card", total=8.2e9),
    PublishedSize(shape="qwen3-30b-a3b", source="huggingface.co/Qwen/Qwen3-30B-A3B, model card", total=30.5e9, active=3.3e9),
    PublishedSize(shape="mixtral-8x7b", source="mistral.ai/news/mixtral-of-experts", total=46.7e9, active=12.9e9),
    PublishedSize(shape="mixtral-8x7b", source=CORE_PAGE, total=56e9, active=7e9),
    PublishedSize(shape="mixtral-8x22b", source="mistral.ai/news/mixtral-8x22b", total=141e9, active=39e9),
    PublishedSize(shape="mixtral-8x22b", source=CORE_PAGE, total=176e9, active=22e9),
    PublishedSize(shape="deepseek-v3", source="arXiv 2412.19437", total=671e9, active=37e9, active_has_input_table=False),
    # It says that both tables of the vocabulary are in its 36.7; by the sizes of its layers, only the output layer's is.
    PublishedSize(shape="deepseek-v3", source=DEEPSEEK_WEIGHTS, total=671e9, active=36.7e9, active_has_input_table=False),
    PublishedSize(shape="gpt-3-175b", source="arXiv 2005.14165, table 2.1", total=175e9),
    PublishedSize(shape="gpt-462b", source="github.com/NVIDIA/Megatron-LM images/model_table.png", total=462e9),
    PublishedSize(shape="gpt-30m", source=SUITE, total=30e6),
    PublishedSize(shape="gpt-124m", source=SUITE, total=124e6),
    PublishedSize(shape="gpt-354m", source=SUITE, total=354e6),
    PublishedSize(shape="gpt-773m", source=SUITE, total=773e6),
    PublishedSize(shape="gpt-1.5b", source=SUITE, total=1.44e9),
    PublishedSize(shape="gpt-3b", source=SUITE, total=2.65e9),
    PublishedSize(shape="gpt-7b", source=SUITE, total=5.24e9),
    PublishedSize(shape="gpt-13b", source=SUITE, total=10.12e9),
)

WEIGHTS: tuple[PublishedWeights, ...] = (
    # The page names sizes, not models, in these two rows; Llama 2's are the ones that they round.
    PublishedWeights(shape="llama-2-7b", source=CORE_PAGE, bytes_by_dtype={"fp16": 14e9, "bf16": 14e9, "fp8": 7e9}),
    PublishedWeights(shape="llama-2-13b", source=CORE_PAGE, bytes_by_dtype={"fp16": 26e9, "bf16": 26e9, "fp8": 13e9}),
    PublishedWeights(shape="llama-3-70b", source=CORE_PAGE, bytes_by_dtype={"fp16": 140e9, "bf16": 140e9, "fp8": 70e9}),
    PublishedWeights(shape="gpt-3-175b", source=CORE_PAGE, bytes_by_dtype={"fp16": 350e9, "bf16": 350e9, "fp8": 175e9}),
    PublishedWeights(shape="llama-3.1-405b", source=CORE_PAGE, bytes_by_dtype={"fp16": 810e9, "bf16": 810e9, "fp8": 405e9}),
)

HARDWARE: tuple[PublishedHardware, ...] = (
    PublishedHardware(
        accelerator="NVIDIA H100 80GB HBM3",
        source=CORE_PAGE,
        peak_flops={"fp16": 1979e12, "bf16": 1979e12, "fp8": 3958e12},
        bandwidth_bytes_per_second=3.35e12,
        link_bytes_per_second=900e9,
    ),
    PublishedHardware(
        accelerator="NVIDIA A100-SXM4-80GB",
        source=CORE_PAGE,
        peak_flops={"fp16": 312e12, "bf16": 312e12},
        bandwidth_bytes_per_second=2e12,
        link_bytes_per_second=600e9,
    ),
)
"""As printed. The page gives H100's peaks with 2:4 sparsity, and A100's dense ones although it says otherwise."""
