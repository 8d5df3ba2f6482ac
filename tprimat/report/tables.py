"""Tables of text: aligned columns for a terminal, and Markdown; numbers with their intervals."""

import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence

from tprimat.core import units
from tprimat.records.schema import Estimate
from tprimat.report.screen import PLAIN, Painted, Screen

CELLS = re.compile(r" (?<!\\)\| ")
"""What separates the cells of a row of Markdown."""
MARKS = re.compile(r"[\\|]|<(?=[A-Za-z/!?])|\](?=[(\[:])|(?<=:)/(?=/)|(?<=www)\.")
LABEL = 28
"""Columns that the name of a row may keep before others drop out for it."""
PIPED = 120
"""Columns of a table in a pipe or a file."""


def columns(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    screen: Screen = PLAIN,
    drop: Sequence[str] = (),
) -> str:
    """Format a table for a terminal.

    Args:
        header: of the columns.
        rows: as many cells each.
        left: the number of columns of text, flush left; the others, of numbers, are flush right and never broken.
        screen: what the table must fit; columns drop out until it does, then text is broken between words. A pipe and a file lose
            none: text is broken, then the columns go into several tables below each other, each with the text.
        drop: headings in the order in which they drop out; then the last columns do.
    """
    cells = [list(column) for column in zip(header, *rows, strict=True)]
    if screen.width is None:
        return "\n\n".join(_table(part, left, max(PIPED, _narrowest(part, left)), screen, ()) for part in _parts(cells, left))
    return _table(cells, left, screen.width, screen, drop)


def wide(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Format a table with one line for each row, however long, where a script may look for rows; arguments as of `columns`."""
    return _table([list(column) for column in zip(header, *rows, strict=True)], left, sys.maxsize, PLAIN, ())


def _parts(cells: Sequence[Sequence[str]], left: int) -> list[list[Sequence[str]]]:
    """Divide the columns of figures so that each part fits PIPED beside the columns of text."""
    text = max(left, 1)
    parts = [list(cells[:text])]
    for column in cells[text:]:
        if len(parts[-1]) > text and _narrowest([*parts[-1], column], left) > PIPED:
            parts.append(list(cells[:text]))
        parts[-1].append(column)
    return parts


def _narrowest(cells: Sequence[Sequence[str]], left: int) -> int:
    """Return the width of a table whose text is broken."""
    return _total(
        {index: _least(column, LABEL, PIPED) if index < left else max(map(len, column)) for index, column in enumerate(cells)}
    )


def _least(column: Sequence[str], label: int, limit: int) -> int:
    """Return the width to which a column of text may shrink: its longest word stays whole, such as a name, up to half a line."""
    word = max((len(word) for cell in column for word in cell.split()), default=0)
    return min(max(map(len, column)), max(label, min(word, limit // 2)))


def _table(cells: Sequence[Sequence[str]], left: int, limit: int, screen: Screen, drop: Sequence[str]) -> str:
    kept = _fitting(cells, left, limit, drop)
    broken = [
        _broken(cells[index], width) if index < left else [[cell] for cell in cells[index]] for index, width in kept.items()
    ]
    widths = list(kept.values())
    flush = sum(index < left for index in kept)
    heading, *body = [_block(lines, widths, flush, screen) for lines in zip(*broken, strict=True)]
    text = "\n".join([heading, _line(["-" * width for width in widths], widths, flush, screen), *body])
    missing = [column[0] for index, column in enumerate(cells) if index not in kept]
    if not missing:
        return text
    note = f"not shown here: {', '.join(dict.fromkeys(missing))}"
    return f"{text}\n{screen.prose(note, 2, 'quiet')}"


def _fitting(cells: Sequence[Sequence[str]], left: int, limit: int, drop: Sequence[str]) -> dict[int, int]:
    """Return the columns that fit -> their widths. Text shrinks to LABEL or its share of the screen before columns drop out."""
    label = min(LABEL, limit // (left + 1))
    least = {index: _least(column, label, min(limit, PIPED)) for index, column in enumerate(cells[:left])}
    widths = {index: max(map(len, column)) for index, column in enumerate(cells)}
    order = [index for name in drop for index in widths if cells[index][0] == name]
    order += [index for index in reversed(widths) if index > 1 and index not in order]
    while order and _total(widths) - sum(widths[index] - least[index] for index in widths if index < left) > limit:
        del widths[order.pop(0)]
    for index in sorted((index for index in widths if index < left), key=lambda index: -widths[index]):
        widths[index] = min(widths[index], max(least[index], widths[index] - (_total(widths) - limit)))
    return widths


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _broken(cells: Sequence[str], width: int | None) -> list[list[str]]:
    """Break each cell of a column of text into lines; a width of None leaves numbers whole."""
    found: list[list[str]] = []
    for cell in cells:
        if width is None or len(cell) <= width:
            found.append([cell])
            continue
        lines = textwrap.wrap(cell, width, break_on_hyphens=False)
        found.append([Painted(line, cell.meaning) for line in lines] if isinstance(cell, Painted) else lines)
    return found


def _block(cells: Sequence[Sequence[str]], widths: Sequence[int], left: int, screen: Screen) -> str:
    """Format one row, of as many lines as its tallest cell has."""
    return "\n".join(_line(line, widths, left, screen) for line in itertools.zip_longest(*cells, fillvalue=""))


def _line(cells: Sequence[str], widths: Sequence[int], left: int, screen: Screen) -> str:
    padded = []
    for index, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - len(cell))
        text = screen.paint(cell, cell.meaning) if isinstance(cell, Painted) else cell
        padded.append(text + space if index < left else space + text)
    return "  ".join(padded).rstrip()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format a Markdown table: the first `left` columns flush left, the others, of numbers, flush right."""
    rule = [":--" if number < left else "--:" for number in range(len(header))]
    return "\n".join("| " + " | ".join(map(escaped, row)) + " |" for row in (header, rule, *rows))


def filled_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Format a Markdown table without the columns in which no row has a value; arguments as of `table`."""
    kept = [number for number in range(len(header)) if any(row[number] != units.ABSENT for row in rows)]
    header, *rows = ([row[number] for number in kept] for row in (header, *rows))
    return table(header, rows, left=sum(number < left for number in kept))


def escaped(text: str) -> str:
    """Return text for a line of Markdown in which names and causes from files end no cell and become no link and no HTML."""
    return MARKS.sub(r"\\\g<0>", text.replace("\n", " "))


def markdown_as_text(page: str, screen: Screen = PLAIN, drop: Sequence[str] = ()) -> str:
    """Return Markdown for a terminal: aligned tables that fit, titles without hashes, paragraphs broken between words.

    Columns drop out of tables in the order of the headings in `drop`.
    """
    found = []
    for block in page.split("\n\n"):
        lines = block.split("\n")
        if len(lines) > 1 and lines[0].startswith("| ") and set(lines[1]) <= set("|:- "):
            header, rule, *rows = [[_without_marks(cell) for cell in CELLS.split(line[2:-2])] for line in lines]
            found.append(columns(header, rows, left=sum(not cell.endswith(":") for cell in rule), screen=screen, drop=drop))
        elif block.startswith("#"):
            found.append(screen.prose(block.lstrip("# "), meaning="heading"))
        else:
            items = lines if block.startswith("- ") else [" ".join(lines)]
            found.append("\n".join(screen.prose(_without_marks(line), 2 if line.startswith("- ") else 0) for line in items))
    return "\n\n".join(found)


def _without_marks(text: str) -> str:
    return re.sub(r"\\([\\|<\]/.])", r"\1", text.replace("**", "").replace("`", ""))


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


FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def csv_cell(value: object) -> object:
    """Return a value for a CSV file; text that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_SIGNS) else value
