"""TPrimat: which parallelism strategy trains an LLM fastest on this machine, and how sure that is."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """BenchmarkCallback, for any Lightning Trainer, imports torch and Lightning, so it is fetched when asked for."""
    if name == "BenchmarkCallback":
        from tprimat.train.callback import BenchmarkCallback

        return BenchmarkCallback
    raise AttributeError(name)
