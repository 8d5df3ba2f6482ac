"""compare.py --published: the nearest published results, and how to run the same here."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tprimat.analyze.groups import Group
    from tprimat.facts.published import PublishedResult

CONFIGURED = {"llama-3.1-8b": "llama", "qwen-2.5-7b": "qwen"}
"""Shape -> key in config.yaml; every other shape takes the place of llama's."""
STRATEGY = "published"
GPUS_A_NODE = 8
USUAL_BATCH = 128
PLATFORMS = {"cuda": "nvidia", "rocm": "amd", "cpu": "cpu"}
PRECISIONS = ("bf16", "fp8", "fp32")
FP8_ENGINES = {"nvidia": "nemo", "amd": "primus"}
"""The engines with Transformer Engine, through which these fp8 results were made."""


def section(groups: "Sequence[Group]") -> str:
    """What is printed below a comparison."""
    from tprimat.analyze.published import neighbourhood
    from tprimat.report.published import text

    found = [near for group in groups if (near := neighbourhood(group)) is not None]
    if not found:
        return "No published neighbours: no configuration here has a FLOP/s to set beside them.\n"
    platform = PLATFORMS[found[0].ours.run.machine.platform]
    return text(found, lambda result: reproduce(result, platform))


def reproduce(result: "PublishedResult", platform: str) -> str:
    """The command as a line, or why there is none."""
    reason = why_not(result)
    return f"– ({reason})" if reason else shlex.join(command(result, platform))


def why_not(result: "PublishedResult") -> str | None:
    """Why a published configuration cannot be run here, whatever the machine; None where it can."""
    from tprimat.facts.models import model_shape

    if result.shape is None:
        return "the shape of its model is not known here"
    layers = model_shape(result.shape).layers
    stages = result.pipeline_parallel or 1
    return f"its {layers} layers do not make {stages} equal pipeline stages" if layers % stages else None


def command(result: "PublishedResult", platform: str) -> list[str]:
    """The call of ./benchmark.py that trains a published configuration here, where nothing speaks against it (why_not).

    What the source does not tell is left to config.yaml, a batch that its ranks can divide excepted.

    Args:
        result: what others ran.
        platform: the machine here, nvidia or amd.
    """
    model = CONFIGURED.get(result.shape or "", "llama")
    words = ["./benchmark.py", "--model", model, "--parallel", STRATEGY, *_size(result)]
    for flag, value in (
        ("--sequence-length", result.sequence_tokens),
        ("--micro-batch-size", result.micro_batch_sequences),
        ("--global-batch-size", result.global_batch_sequences or _batch(result)),
        ("--precision", result.dtype if result.dtype in PRECISIONS else None),
        ("--engine", FP8_ENGINES.get(platform) if result.dtype == "fp8" else None),
    ):
        words += [flag, str(value)] if value is not None else []
    if result.shape not in CONFIGURED:
        words += ["--set", f"models.{model}.architecture={result.shape}"]
    for key, degree in (
        ("tensor_model_parallel_size", result.tensor_parallel or 1),
        ("pipeline_model_parallel_size", result.pipeline_parallel),
        ("context_parallel_size", result.context_parallel),
    ):
        words += ["--set", f"parallelism.{STRATEGY}.{model}.{platform}.{key}={degree}"] if degree is not None else []
    return words


def _batch(result: "PublishedResult") -> int | None:
    """A batch that the ranks divide, of USUAL_BATCH sequences or a little more, where the source does not tell it."""
    if result.gpus is None:
        return None
    split = (result.tensor_parallel or 1) * (result.pipeline_parallel or 1) * (result.context_parallel or 1)
    together = (result.micro_batch_sequences or 1) * (result.gpus // split)
    return -(-USUAL_BATCH // together) * together


def _size(result: "PublishedResult") -> list[str]:
    if result.gpus is None:
        return []
    if result.gpus <= GPUS_A_NODE or result.gpus % GPUS_A_NODE:
        return ["--gpus", str(result.gpus)]
    return ["--gpus", str(GPUS_A_NODE), "--nodes", str(result.gpus // GPUS_A_NODE)]
