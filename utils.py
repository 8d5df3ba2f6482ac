"""The callback for any Lightning Trainer, and the detection of the platform.

python3 -c "from utils import detect_platform; print(detect_platform())"
"""

from typing import Any

from tprimat.hardware.nodes import this_machine


def detect_platform() -> str:
    """cuda, rocm or cpu, without importing torch."""
    machine = this_machine()
    return machine.platform if machine else "cpu"


def __getattr__(name: str) -> Any:
    """BenchmarkCallback imports torch and Lightning, so it is fetched when asked for."""
    if name == "BenchmarkCallback":
        import tprimat

        return tprimat.BenchmarkCallback
    raise AttributeError(name)
