"""torch.compile for the element-wise parts that all layers share."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

SHAPES = 64
"""Of one function's arguments. Beyond torch's own limit of 8 a function runs uncompiled, with no more than a warning."""


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled version of a function for the whole process, with a graph for each shape that it meets."""
    dynamo = import_module("torch._dynamo")
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, SHAPES)
    return torch.compile(function, dynamic=False)


def compiled_graphs() -> tuple[int, int]:
    """What torch.compile made anew in this process, and what it found in its cache on the disk."""
    counted: Counter[str] = import_module("torch._dynamo.utils").counters["inductor"]
    made = counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"]
    return made, counted["fxgraph_cache_hit"]
