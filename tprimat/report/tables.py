"""Tables of text: aligned columns for a terminal, and Markdown; numbers with their intervals."""

from collections.abc import Callable, Sequence

from tprimat import units
from tprimat.records.schema import Estimate


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format a table for a terminal: the first `left` columns flush left, the others, of numbers, flush right."""
    widths = [max(len(cell) for cell in cells) for cells in zip(header, *rows, strict=True)]
    lines = [_line(cells, widths, left) for cells in [header, ["-" * width for width in widths], *rows]]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    padded = [
        cell.ljust(width) if index < left else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format a Markdown table: the first `left` columns flush left, the others, of numbers, flush right."""
    rule = [":--" if number < left else "--:" for number in range(len(header))]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, rule, *rows))


def with_interval(estimate: Estimate | None, show: Callable[[float], str], between: str = ", ") -> str:
    """Format a number with its 95 % interval, '12.1 [11.9, 12.3]', or with 'n = 1' where a single sample has none."""
    if estimate is None:
        return units.ABSENT
    if estimate.low is None or estimate.high is None:
        return f"{show(estimate.value)} (n = 1)"
    return f"{show(estimate.value)} [{show(estimate.low)}{between}{show(estimate.high)}]"


def plural(number: int, noun: str) -> str:
    """Format a count: '1 run', '1,200 runs'."""
    return f"{units.count(number)} {noun}{'' if number == 1 else 's'}"


FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def csv_cell(value: object) -> object:
    """Return a value for a CSV file; text that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_SIGNS) else value
