"""torch.compile for the element-wise parts that all layers share."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled version of a function for the whole process."""
    return torch.compile(function, dynamic=False)
