"""What a terminal can show, and tables that fit it: aligned columns, and Markdown; numbers with their intervals."""

import os
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TextIO

from tprimat.core import units
from tprimat.records.schema import Estimate

NARROWEST = 80
"""Columns for which tables are made; a narrower terminal wraps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What text is made for."""

    width: int | None = None
    """Columns; None for a pipe or a file, which hold everything."""

    def prose(self, text: str, indent: int = 0) -> str:
        """Break a line between words; lines after the first are indented. Paths and commands stay whole."""
        if self.width is None:
            return text
        return "\n".join(
            textwrap.wrap(text, self.width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
        )


PLAIN = Screen()


def screen_of(stream: TextIO | None) -> Screen:
    """Return what a stream can show: PLAIN unless it is a terminal."""
    if stream is None or not stream.isatty():
        return PLAIN
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        width = NARROWEST
    return Screen(width=max(width, NARROWEST))


MARKS = re.compile(r"[\\|]|<(?=[A-Za-z/!?])|\](?=[(\[:])|(?<=:)/(?=/)|(?<=www)\.")
LABEL = 28
"""Columns that text may keep before other columns drop out for it."""


def _with_values(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> tuple[list[tuple[str, ...]], int]:
    """Return the columns of a table in which a row has a value, and how many of the first are of text."""
    every = list(zip(header, *rows, strict=True))
    kept = [number for number, column in enumerate(every) if not rows or {*column[1:]} - {units.ABSENT, ""}]
    return [every[number] for number in kept], sum(number < left for number in kept)


def columns(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    screen: Screen = PLAIN,
    drop: Sequence[str] = (),
) -> str:
    """Format a table for a terminal, without columns that have no value; a pipe and a file get one line for each row.

    The first `left` columns are of text, flush left; the others, of numbers, are flush right and never broken. Columns drop out
    until the table fits the screen, those in `drop` first, then the last ones; then text is broken between words.
    """
    cells, left = _with_values(header, rows, left)
    widths = {index: max(map(len, column)) for index, column in enumerate(cells)}
    if screen.width is not None:
        _fit(widths, cells, left, screen.width, drop)
    broken = {
        index: [[cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False) for cell in cells[index]]
        for index, width in widths.items()
    }
    lines = []
    for number in range(len(rows) + 1):
        for row in zip_longest(*(column[number] for column in broken.values()), fillvalue=""):
            padded = (f"{cell:{'<' if index < left else '>'}{widths[index]}}" for cell, index in zip(row, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
        lines += ["  ".join("-" * width for width in widths.values())] if number == 0 else []
    if missing := dict.fromkeys(column[0] for index, column in enumerate(cells) if index not in widths):
        lines.append(screen.prose(f"not shown here: {', '.join(missing)}", 2))
    return "\n".join(lines)


def _fit(widths: dict[int, int], cells: Sequence[Sequence[str]], left: int, limit: int, drop: Sequence[str]) -> None:
    """Drop columns, and narrow those of text, until a table fits."""
    shares = {index: limit // (left + 1 if index == 0 else 2 * left + 1) for index in widths if index < left}
    longest = {index: max((len(word) for cell in cells[index] for word in cell.split()), default=8) for index in shares}
    least = {index: min(widths[index], LABEL, max(8, share, longest[index])) for index, share in shares.items()}
    order = [index for name in drop for index in widths if cells[index][0] == name]
    order += [index for index in reversed(widths) if index > 1 and index not in order]

    def over() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - limit

    while order and over() > sum(widths[index] - least[index] for index in least if index in widths):
        del widths[order.pop(0)]
    for index in sorted(least.keys() & widths.keys(), key=lambda index: -widths[index]):
        widths[index] = max(least[index], widths[index] - max(0, over()))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format a Markdown table likewise: the first `left` columns flush left, the others, of numbers, flush right."""
    cells, left = _with_values(header, rows, left)
    rule = [":--" if number < left else "--:" for number in range(len(cells))]
    first, *rest = zip(*cells, strict=True)
    return "\n".join("| " + " | ".join(map(escaped, row)) + " |" for row in (first, rule, *rest))


def escaped(text: str) -> str:
    """Return text for a line of Markdown in which names and causes from files end no cell and become no link and no HTML."""
    return MARKS.sub(r"\\\g<0>", text.replace("\n", " "))


VAGUE = 10
"""Upper over lower end from which an interval says nothing about a figure: two or three samples make it, and its ends mislead."""
TOO_FEW = "too few steps or runs for an interval"


def is_vague(estimate: Estimate) -> bool:
    """Return whether an interval is too wide to be of use."""
    return estimate.low is not None and estimate.high is not None and 0 < VAGUE * estimate.low <= estimate.high


def useful_ends(estimate: Estimate) -> tuple[float | None, float | None]:
    """Return the ends of an interval for a picture; none where it is too wide to be of use, and would hide all the others."""
    return (None, None) if is_vague(estimate) else (estimate.low, estimate.high)


def shows_nothing(ratio: Estimate) -> bool:
    """Return whether the interval of a ratio is too wide to be of use, and does not even tell which side is larger."""
    return is_vague(ratio) and (ratio.low or 0.0) <= 1 <= (ratio.high or 0.0)


def with_interval(estimate: Estimate | None, show: Callable[[float], str]) -> str:
    """Format a number with its 95 % interval, or with 'n = 3' where there is none, or none of use.

    12.1, 11.9 and 12.3 -> '12.1 [11.9, 12.3]'; a percentage has one sign: '12.1 % [11.9, 12.3]'.
    """
    if estimate is None:
        return units.ABSENT
    if estimate.low is None or estimate.high is None or is_vague(estimate):
        return f"{show(estimate.value)} (n = {estimate.samples})"
    low, high = (show(end).removesuffix(" %") for end in (estimate.low, estimate.high))
    return f"{show(estimate.value)} [{low}, {high}]"


def plural(number: int, noun: str) -> str:
    """Format a count: '1 run', '1,200 runs'."""
    return f"{units.count(number)} {noun}{'' if number == 1 else 's'}"
