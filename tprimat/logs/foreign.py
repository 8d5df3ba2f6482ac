"""Frameworks whose steps are not read (data/other_frameworks.yaml), so that a refusal can name them."""

import re
from dataclasses import dataclass
from functools import cache

from tprimat.core.rows import RefuseUnknownKeys, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign(RefuseUnknownKeys):
    """A framework whose steps are not read."""

    name: str
    pattern: str
    """Of its lines."""
    why: str = "Nothing here reads its lines."
    fix: str | None = None
    """What its user can do instead."""
    step: str | None = None
    """Pattern of the number of a step, and where it says so their total."""
    beside: bool = False
    """It prints beside another framework, whose failure before the first step counts."""
    outranks: bool = False
    """Its lines look like those of a framework that is read."""
    source: str


@cache
def foreign_frameworks() -> tuple[Foreign, ...]:
    """Return all of them, specific ones before general ones."""
    return read_rows("other_frameworks.yaml", "frameworks", Foreign)


def foreign_of(text: str, *, outranks: bool = False) -> Foreign | None:
    """Return the framework that wrote a line, where it is one whose steps are not read; of those that `outranks` alone."""
    candidates = (one for one in foreign_frameworks() if one.outranks or not outranks)
    return next((one for one in candidates if re.search(one.pattern, text)), None)
