"""The class of work that the name of a kernel stands for."""

import re
from functools import cache
from typing import Literal, get_args

from tprimat.core.rows import DATA, document

WorkClass = Literal[
    "matmul",
    "expert_matmul",
    "router",
    "permute",
    "attention",
    "norm_elementwise",
    "optimizer",
    "other",
    "communication",
    "memory_copy",
]
CLASSES: tuple[WorkClass, ...] = get_args(WorkClass)
"""Where classes overlap, a moment belongs to the first of these: communication counts only where no computation hides it."""
COMPUTE = CLASSES[:-2]
"""Classes that can hide communication."""


@cache
def kernel_patterns() -> tuple[tuple[re.Pattern[str], WorkClass], ...]:
    """Return pattern of a lower-case name -> class; the first that matches decides."""
    rows = [(row["pattern"], row["class"]) for row in document(DATA / "kernels.yaml")["kernels"]]
    return tuple((re.compile(text if isinstance(text, str) else "|".join(text)), kind) for text, kind in rows)


@cache
def kernel_class(name: str) -> WorkClass:
    """Return the class of a kernel on an accelerator."""
    small = name.lower()
    return next((kind for pattern, kind in kernel_patterns() if pattern.search(small)), "other")
