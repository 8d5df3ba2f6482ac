"""Build the ./benchmark.py command that runs a published configuration on this machine."""

import shlex

from tprimat.facts.accelerators import PLATFORM_OF, Backend
from tprimat.facts.models import model_shape
from tprimat.facts.published import PublishedResult

CONFIGURED_MODELS = {"llama-3.1-8b": "llama", "qwen-2.5-7b": "qwen"}
"""Shape -> key in config.yaml; every other shape replaces llama's."""
STRATEGY = "published"
GPUS_PER_NODE = 8
USUAL_BATCH_SEQUENCES = 128
PRECISIONS = ("bf16", "fp8", "fp32")
FP8_ENGINES: dict[Backend, str] = {"cuda": "nemo", "rocm": "primus"}
"""The engines with Transformer Engine, which these fp8 results used."""


def reproduce(result: PublishedResult, backend: Backend) -> str:
    """Return the command as one line, or the reason why there is none."""
    reason = refusal(result)
    return f"– ({reason})" if reason else shlex.join(command(result, backend))


def refusal(result: PublishedResult) -> str | None:
    """Return why TPrimat cannot run a published configuration on any machine; None where it can."""
    if result.shape is None:
        return "the shape of its model is not known here"
    layers = model_shape(result.shape).layers
    stages = result.pipeline_parallel or 1
    return f"its {layers} layers do not make {stages} equal pipeline stages" if layers % stages else None


def command(result: PublishedResult, backend: Backend) -> list[str]:
    """Return the words of the command for a published configuration that `refusal` accepts.

    What the source does not say is left to config.yaml, except for a global batch that the ranks can divide.

    Args:
        result: what others ran.
        backend: of this machine.
    """
    model = CONFIGURED_MODELS.get(result.shape or "", "llama")
    words = ["./benchmark.py", "--model", model, "--parallel", STRATEGY, *_gpu_flags(result)]
    for flag, value in (
        ("--sequence-length", result.sequence_tokens),
        ("--micro-batch-size", result.micro_batch_sequences),
        ("--global-batch-size", result.global_batch_sequences or _divisible_batch(result)),
        ("--precision", result.dtype if result.dtype in PRECISIONS else None),
        ("--engine", FP8_ENGINES.get(backend) if result.dtype == "fp8" else None),
    ):
        words += [flag, str(value)] if value is not None else []
    if result.shape not in CONFIGURED_MODELS:
        words += ["--set", f"models.{model}.architecture={result.shape}"]
    for key, degree in (
        ("tensor_model_parallel_size", result.tensor_parallel or 1),
        ("pipeline_model_parallel_size", result.pipeline_parallel),
        ("context_parallel_size", result.context_parallel),
    ):
        setting = f"parallelism.{STRATEGY}.{model}.{PLATFORM_OF[backend]}.{key}={degree}"
        words += ["--set", setting] if degree is not None else []
    return words


def _divisible_batch(result: PublishedResult) -> int | None:
    """Return the smallest batch from USUAL_BATCH_SEQUENCES up that the ranks can divide."""
    if result.gpus is None:
        return None
    model_parallel = (result.tensor_parallel or 1) * (result.pipeline_parallel or 1) * (result.context_parallel or 1)
    sequences = (result.micro_batch_sequences or 1) * (result.gpus // model_parallel)
    return -(-USUAL_BATCH_SEQUENCES // sequences) * sequences


def _gpu_flags(result: PublishedResult) -> list[str]:
    if result.gpus is None:
        return []
    if result.gpus <= GPUS_PER_NODE or result.gpus % GPUS_PER_NODE:
        return ["--gpus", str(result.gpus)]
    return ["--gpus", str(GPUS_PER_NODE), "--nodes", str(result.gpus // GPUS_PER_NODE)]
