"""Lay out a picture: headline, subtitle, panels in rows without gaps, legend and notes. A panel without data takes no place."""

import difflib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tprimat.core.errors import ConfigError
from tprimat.report.plots.style import (
    DARK,
    DOTS_PER_INCH,
    ENDS,
    LIGHT,
    MOST_SERIES,
    SMALL,
    Look,
    Paper,
    figure,
    fit_texts,
    save,
    text_width,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.gridspec import SubplotSpec

MARGIN = 0.14
"""Inches around the words of header and footer."""
HEADLINES, SUBTITLE = (14, 13, 12), 9.5
"""Sizes of text, in points; of the headline the largest at which its lines fit."""
LINE = 1.5
"""Height of a line of text, in its size."""
SIMILAR = 2.3
"""Ratio of heights up to which panels share a row."""
MOST_LINES = 4
"""Of the name of a workload above its part of a panel."""
HANDLE = 0.42
"""Inches of the line in a legend entry."""


@dataclass(slots=True, kw_only=True)
class Canvas:
    """Where a panel is drawn."""

    part: "SubFigure"
    place: "SubplotSpec"
    paper: Paper
    labelled: bool
    """Whether the panel labels its rows: not where its left neighbour has the same ones."""
    inches: float
    """Width of the panel, with its labels."""
    number: int | None = None
    """Of the panel, before its title."""
    after_layout: list[Callable[[], object]] = field(default_factory=list)
    """Called when sizes are known: limits that depend on the width of texts, labels that avoid each other."""

    def axes(self, title: str) -> "Axes":
        """Return the only axes of a panel."""
        made = self.part.add_subplot(self.place)
        made.set_title(self._numbered(title))
        return made

    def _numbered(self, title: str) -> str:
        return title if self.number is None else f"{self.number}  {title}"

    def split(self, title: str, names: Sequence[str]) -> "list[Axes]":
        """Return one axes for each workload, side by side, under one title and their names."""
        if len(names) == 1 and not names[0]:
            return [self.axes(title)]
        grid = self.place.subgridspec(1, len(names))
        made = [self.part.add_subplot(grid[0, column]) for column in range(len(names))]
        self._name(made, title, names, [self.inches / len(names)] * len(names))
        self.after_layout.append(lambda: self._name(made, title, names, [_inches(axes) for axes in made]))
        return made

    def _name(self, parts: "Sequence[Axes]", title: str, names: Sequence[str], widths: Sequence[float]) -> None:
        broken = [wrapped(name, inches, SMALL, most=MOST_LINES) for name, inches in zip(names, widths, strict=True)]
        lines = max(map(len, broken))
        parts[0].set_title(self._numbered(title) + "\n" * lines)
        style: dict[str, Any] = {"size": SMALL, "weight": "normal", "style": "italic", "color": self.paper.soft}
        for axes, name in zip(parts, broken, strict=True):
            padded = ["\u00a0", *name, *["\u00a0"] * (lines - len(name))]
            axes.set_title("\n".join(padded), loc="center", x=0, ha="left", **style)

    def notes(self, axes: "Axes", first: str, notes: Sequence[str]) -> None:
        """Name the horizontal axis, with notes below that are as wide as it is."""

        def write(inches: float) -> None:
            lines = [line for note in notes for line in wrapped(note, inches, SMALL)]
            axes.set_xlabel("\n".join([first, *lines]), size=SMALL)

        write(3)
        self.after_layout.append(lambda: write(_inches(axes)))

    def at_end(self, axes: "Axes", x: float, y: float, text: str) -> None:
        """Write a value at the end of a bar; `fit` makes room for it."""
        axes.text(x, y, text, va="center", size=SMALL).set_gid(ENDS)

    def fit(self, axes: "Axes") -> None:
        """Let the axes end where its texts end, once the layout is known."""
        self.after_layout.append(lambda: fit_texts(axes))


def _inches(axes: "Axes") -> float:
    return float(axes.get_window_extent().width) / DOTS_PER_INCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of a picture, before it is drawn."""

    key: str
    """Its name on the command line."""
    height: float
    """Of its row, in inches, with title and axis."""
    draw: Callable[[Canvas], None]
    rows: str = ""
    """What its rows are; neighbours with the same rows label them once. Empty: its rows have no labels."""
    present: bool = True
    """Whether it has anything to show."""
    whole_row: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A picture, before it is drawn."""

    headline: Sequence[str]
    subtitle: Sequence[str]
    panels: Sequence[Panel]
    legend: Sequence[tuple[str, Look]] = ()
    notes: Sequence[str] = ()
    curves: bool = True
    """Whether the legend shows lines as the curves have them."""
    width: float = 14
    """In inches."""
    columns: int = 2
    numbered: bool = False
    """Whether the panels that are drawn have numbers, from 1 on."""


def check_names(known: Sequence[str], keys: Sequence[str] | None) -> None:
    """Refuse a name that no panel has.

    Raises:
        ConfigError: there is such a name among the keys.
    """
    for key in keys or ():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"{near[0]}, or another of " if near else "some of "
            raise ConfigError(f"There is no panel {key!r}.", where="--panels", fix=hint + ",".join(known))


def chosen_panels(panels: Sequence[Panel], keys: Sequence[str] | None) -> list[Panel]:
    """Return the panels with data, or those that a user named, in the order of the picture.

    Raises:
        ConfigError: no panel has such a name, or none of those named has data.
    """
    check_names([panel.key for panel in panels], keys)
    shown = [panel for panel in panels if panel.present and (keys is None or panel.key in keys)]
    if not shown:
        present = ",".join(panel.key for panel in panels if panel.present)
        raise ConfigError("None of these panels has data.", where="--panels", fix=f"leave it out, or some of {present}")
    return shown


def draw_sheet(sheet: Sheet, path: Path, *, panels: Sequence[str] | None = None, dark: bool = False) -> None:
    """Draw a picture into a .png, .svg or .pdf file: the named panels, or all that have data, of which there is one at least.

    Raises:
        ConfigError: a panel that does not exist, or only panels without data.
        UserError: another suffix, or a folder that cannot be written.
    """
    with drawn(sheet, panels, dark=dark) as picture:
        save(picture, path)


@contextmanager
def drawn(sheet: Sheet, panels: Sequence[str] | None = None, *, dark: bool = False) -> "Iterator[Figure]":
    """Draw a picture; it can be saved inside the with statement."""
    paper = DARK if dark else LIGHT
    chosen = chosen_panels(sheet.panels, panels)
    rows = _rows(chosen, sheet.columns)
    room = sheet.width - 2 * MARGIN
    size = next(
        (size for size in HEADLINES if all(text_width(line, size, "bold") <= room for line in sheet.headline)), HEADLINES[-1]
    )
    headline = [line for text in sheet.headline for line in wrapped(text, room, size, "bold")]
    subtitle = [line for text in sheet.subtitle for line in wrapped(text, room, SUBTITLE)]
    notes = [line for text in sheet.notes for line in wrapped(text, room, SMALL)]
    entries = _legend_lines(() if all(panel.rows for panel in chosen) else sheet.legend, room)  # rows say what they are
    header = 2 * MARGIN + (size * len(headline) + SUBTITLE * len(subtitle)) * LINE / 72
    footer = 2 * MARGIN + (SUBTITLE * len(entries) + SMALL * len(notes)) * LINE / 72 if entries or notes else 0.01
    heights = [max(panel.height for panel in row) for row in rows]
    with figure(sheet.width, header + sum(heights) + footer, paper) as picture:
        parts = list(picture.subfigures(len(rows) + 2, 1, squeeze=False, height_ratios=(header, *heights, footer)).flat)
        after_layout: list[Callable[[], object]] = []
        numbers = itertools.count(1) if sheet.numbered else itertools.repeat(None)
        for part, row in zip(parts[1:-1], rows, strict=True):
            after_layout += _draw_row(part, row, sheet.width, paper, numbers)
        _write(picture, MARGIN, headline, size=size, weight="bold")
        _write(picture, MARGIN + size * LINE * len(headline) / 72, subtitle, size=SUBTITLE, color=paper.soft)
        top = picture.get_figheight() - footer + MARGIN
        _legend(picture, top, entries, curves=sheet.curves)
        _write(picture, top + SUBTITLE * LINE * len(entries) / 72, notes, size=SMALL, color=paper.soft)
        lay_out(picture)
        for finish in after_layout:
            finish()
        lay_out(picture)
        picture.set_layout_engine(None)
        _round_places(picture, parts)
        yield picture


def lay_out(picture: "Figure") -> None:
    """Give every part its place; to draw the picture for this would take as long again."""
    engine = picture.get_layout_engine()
    assert engine is not None
    engine.execute(picture)


def _round_places(picture: "Figure", parts: "Sequence[SubFigure]") -> None:
    """Drop the last digits of the layout, which change from call to call: the same data must give the same file."""
    for part in parts:
        part.bbox_relative.set_points(part.bbox_relative.get_points().round(6))
    for axes in picture.axes:
        left, bottom, width, height = (round(end, 6) for end in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))


def _draw_row(
    part: "SubFigure", row: Sequence[Panel], width: float, paper: Paper, numbers: Iterator[int | None]
) -> list[Callable[[], object]]:
    """Draw the panels of a row; return what is left to do when the layout is known."""
    grid = part.add_gridspec(1, len(row))
    after_layout = []
    for column, panel in enumerate(row):
        labelled = not (column and panel.rows and panel.rows == row[column - 1].rows)
        inches = width / len(row)
        canvas = Canvas(part=part, place=grid[0, column], paper=paper, labelled=labelled, inches=inches, number=next(numbers))
        panel.draw(canvas)
        after_layout += canvas.after_layout
    return after_layout


def _rows(panels: Sequence[Panel], columns: int) -> list[list[Panel]]:
    """Fill rows with panels of similar height, so that none stretches its neighbours; a panel of a whole row has it alone."""
    found: list[list[Panel]] = []
    for panel in sorted(panels, key=lambda panel: panel.whole_row):
        row = found[-1] if found else []
        heights = [other.height for other in (*row, panel)]
        fits = row and len(row) < columns and not panel.whole_row and max(heights) <= SIMILAR * min(heights)
        if fits:
            row.append(panel)
        else:
            found.append([panel])
    return found


def _write(picture: "Figure", down: float, lines: Sequence[str], *, size: float, **style: Any) -> None:
    """Write lines from a distance to the top of the picture, in inches."""
    width, height = picture.get_size_inches()
    for number, line in enumerate(lines):
        y = 1 - (down + size * LINE * number / 72) / height
        picture.text(MARGIN / width, y, line, size=size, va="top", parse_math=False, **style)


def _legend_lines(entries: Sequence[tuple[str, Look]], room: float) -> list[list[tuple[float, str, Look]]]:
    """Return the lines of a legend: the place of each entry in inches, its name and look."""
    widths = [HANDLE + 0.35 + text_width(name, SUBTITLE) for name, _ in entries]
    if not entries:
        return []
    columns = max(1, min(len(entries), int(room / max(widths))))
    step = min(max(widths), room / columns)
    cells = [(number % columns * step, name, look) for number, (name, look) in enumerate(entries)]
    lines = [cells[first : first + columns] for first in range(0, len(cells), columns)]
    return [[(x, _cut(name, room), look) for x, name, look in line] for line in lines]


def _cut(name: str, room: float) -> str:
    return wrapped(name, room - HANDLE - 0.2, SUBTITLE, most=1)[0]


def _legend(picture: "Figure", down: float, lines: Sequence[Sequence[tuple[float, str, Look]]], *, curves: bool) -> None:
    from matplotlib.lines import Line2D

    width, height = picture.get_size_inches()
    for number, line in enumerate(lines):
        y = 1 - (down + SUBTITLE * LINE * number / 72) / height
        for x, name, look in line:
            ends = [(MARGIN + x) / width, (MARGIN + x + HANDLE) / width]
            middle = y - SUBTITLE * 0.55 / 72 / height
            handle = Line2D(
                ends,
                [middle, middle],
                color=look.colour,
                linestyle=look.line if curves else "-",
                linewidth=2 if curves else 7,
                solid_capstyle="butt",
            )
            handle.set_transform(picture.transFigure)
            picture.add_artist(handle)
            start = (MARGIN + x + HANDLE + 0.08) / width
            picture.text(start, y, name, size=SUBTITLE, va="top", parse_math=False).set_gid("legend")


def rest_note(named: int) -> str:
    """Return the note about configurations without a colour of their own."""
    return f"Grey: {named} more configurations; the {MOST_SERIES} in colour are the fastest of each workload."
