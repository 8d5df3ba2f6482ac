"""Which dialects there are, and which one a log speaks."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from tprimat.engines.base import LineFields
from tprimat.engines.logs import (
    composer,
    deepspeed,
    maxtext,
    megatron_bridge,
    megatron_lm,
    nanotron,
    nemo,
    primus,
    torchtitan,
    torchtune,
)
from tprimat.engines.logs.bulk import line_pattern
from tprimat.engines.logs.text import plain
from tprimat.errors import ConfigError, RecordError
from tprimat.record.schema import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one framework writes its log."""

    name: str
    read_line: Callable[[str], LineFields | None]
    signs: tuple[tuple[str, ...], ...]
    """A line that holds all words of one row is in this dialect."""
    platform: Platform | None
    """Where the framework runs on one platform only."""
    marks_its_end: bool
    """Whether a log that ends without a closing line was cut short."""

    line_pattern: Callable[[str], re.Pattern[str] | None] | None = None
    """A line of a step -> what lines of its shape match; None for dialects that are read line by line (bulk.py)."""

    def speaks(self, text: str) -> bool:
        """Whether the line gives the dialect away."""
        return any(all(word in text for word in sign) for sign in self.signs)


MARK_THEIR_END = {"primus", "megatron-bridge", "megatron-lm", "nemo", "torchtitan"}


def _dialect(module: ModuleType) -> Dialect:
    return Dialect(
        name=module.NAME,
        read_line=module.read_line,
        signs=module.SIGNS,
        platform=getattr(module, "PLATFORM", None),
        marks_its_end=module.NAME in MARK_THEIR_END,
        line_pattern=line_pattern if module is megatron_lm else None,
    )


DIALECTS: tuple[Dialect, ...] = tuple(
    _dialect(module)
    for module in (
        primus,
        megatron_bridge,
        megatron_lm,
        nemo,
        torchtitan,
        torchtune,
        nanotron,
        maxtext,
        deepspeed,
        composer,
    )
)
"""The particular ones before the general ones: Primus and Megatron-Bridge print Megatron-LM's line with additions."""

NAMES = tuple(dialect.name for dialect in DIALECTS)


def find_dialect(name: str) -> Dialect:
    """By name.

    Raises:
        ConfigError: no such dialect.
    """
    for dialect in DIALECTS:
        if dialect.name == name:
            return dialect
    raise ConfigError(f"There is no log dialect {name!r}.", fix=f"one of {', '.join(NAMES)}")


def dialect_of(text: str) -> Dialect | None:
    """The dialect that one line gives away; None for lines that any framework may print."""
    text = plain(text)
    return next((dialect for dialect in DIALECTS if dialect.speaks(text)), None)


def detect(lines: Iterable[str], *, where: str) -> Dialect:
    """The dialect of a log: the first line that gives one away decides.

    Raises:
        RecordError: no line does; says what was looked for.
    """
    for line in lines:
        if found := dialect_of(line):
            return found
    raise unrecognised(where)


def unrecognised(where: str) -> RecordError:
    """The error for a log without a single training step that we know."""
    looked_for = "\n".join(f"{dialect.name}: " + " or ".join(" … ".join(sign) for sign in dialect.signs) for dialect in DIALECTS)
    return RecordError(
        f"{where} holds no training step of a framework that is known here.",
        where=where,
        why=f"No line holds any of these:\n{looked_for}",
        fix="the log of the rank that prints steps (the last rank, on the last node, for Megatron and Primus)",
    )
