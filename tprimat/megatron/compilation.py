"""torch.compile for the element-wise parts that all layers share."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any

import torch

from tprimat.megatron import compat
from tprimat.train.startup import in_background

MAX_SHAPES = 64
"""Of one function's arguments. Beyond torch's own limit of 8 a function runs uncompiled, with no more than a warning."""


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled version of a function, one for the whole process, with a graph for each shape that it meets."""
    compat.allow_recompilations(MAX_SHAPES)
    return torch.compile(function, dynamic=False)


def compiled_graphs() -> tuple[int, int]:
    """Return how many graphs this process compiled, and how many it found in the compile cache on the disk."""
    counters = compat.compiler_counters()
    return counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"], counters["fxgraph_cache_hit"]


def prefetch_compiler_key() -> Thread:
    """Have Triton compute the checksum of its files, part of every key of the compile cache, on a thread."""

    def compute() -> None:
        with suppress(ImportError, AttributeError, OSError, RuntimeError):  # torch raises the last where Triton is missing
            compat.compute_compiler_key()

    return in_background(compute)
