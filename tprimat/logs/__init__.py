"""Read the training log of another framework: `read_log` returns its run."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `read_log`, fetched when it is asked for: engines read single lines without it."""
    if name == "read_log":
        from tprimat.logs.read import read_log

        return read_log
    raise AttributeError(name)
