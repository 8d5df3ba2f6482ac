"""Rows of text in aligned columns, for a terminal."""

from collections.abc import Sequence


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A header, a rule and the rows; the first `left` columns are flush left, the others, which hold numbers, flush right."""
    widths = [max(len(cell) for cell in cells) for cells in zip(header, *rows, strict=True)]
    lines = [_line(cells, widths, left) for cells in [header, ["-" * width for width in widths], *rows]]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    padded = [
        cell.ljust(width) if index < left else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


# Tables in Markdown.


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are flush left and the others, which hold numbers, flush right."""
    rule = [":--" if number < left else "--:" for number in range(len(header))]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, rule, *rows))
