"""NeMo 2's pre-training recipes, on CUDA; redirected to the CPU for a check that they run."""

from tprimat.engines.worker import WorkerEngine, is_there

ENGINE = WorkerEngine("nemo")

REQUIRED_MODULES = ("torch", "lightning", "megatron.core", "nemo", "nemo_run", "fiddle", "modelopt")
"""What the recipes import at their top."""


def missing_parts() -> list[str]:
    """Modules that NeMo's recipes need and this Python does not have; nothing is imported to find out."""
    return [name for name in REQUIRED_MODULES if not is_there(name)]
