"""Pictures: panels in rows without gaps below one title, in colors that color-blind readers can distinguish.

matplotlib's constrained layout lays them out; a panel without data takes no place.
"""

import io
import logging
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tprimat.core.errors import UserError
from tprimat.records.schema import Estimate
from tprimat.records.store import write_atomically
from tprimat.report.tables import useful_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.gridspec import SubplotSpec

# A home that cannot be written costs matplotlib its cache, and the user nothing; a name in another script shows as boxes.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "Glyph .* missing from font")

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#A89400", "#8A5FBF")
"""Six of Okabe and Ito 2008 (jfly.uni-koeln.de/color), a darker yellow that shows on white, and a violet that shows on black."""
LineStyle = Literal["-", "--", ":", "-."]
LINE_STYLES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")
PICTURES = ("png", "svg", "pdf")
MISSING = "not recorded"
MOST_SERIES = 8
"""Configurations that get a color; the others are named, and gray."""
INK, SOFT, REST = "#16202c", "#566474", "#b9c0c8"
"""Colors of words, of notes and ticks, and of bars and dots without a color of their own; as on the HTML page."""
HEADLINE, SUBTITLE, SMALL, LABEL = 13, 9.5, 8.5, 9
"""Sizes of text in points; small are notes and values, labels are those of rows."""
LEFT = 0.008
"""Where words of header and footer begin, of the width."""
LETTER = 0.55
"""Width of a letter on average, in its size."""
ROOM = 0.55
"""Least share of a panel's width that its axes have beside labels."""


@dataclass(frozen=True, slots=True)
class Look:
    """How one group of runs is drawn in all panels."""

    color: str
    line: LineStyle


def looks(count: int) -> list[Look]:
    """Return a look per group: 32 pairs of color and line, neighbors differing in both, so that covered lines show."""
    colors, lines = len(PALETTE), len(LINE_STYLES)
    return [Look(PALETTE[i % colors], LINE_STYLES[(i + i // colors) % lines]) for i in range(count)]


def readable_log_ticks(axes: "Axes") -> None:
    """Mark a logarithmic vertical axis at 1, 2, 5 and their decades; in steps where it spans less than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5) if high < 10 * low else LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())


@contextmanager
def figure(width: float, height: float) -> Iterator["Figure"]:
    """Open an empty figure of a size in inches; needs no display."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    with mpl.rc_context(fname=Path(__file__).with_name("tprimat.mplstyle")):
        picture = NewFigure(figsize=(width, height), dpi=120, layout="constrained")
        FigureCanvasAgg(picture)
        yield picture


def save(picture: "Figure", path: Path) -> None:
    """Write a picture in its suffix's format. Raises RecordError: it cannot be written; UserError: the suffix names no format."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in PICTURES:
        raise UserError(f"{path} is not a picture.", why=f"Its suffix is {path.suffix!r}.", fix=f"one of {', '.join(PICTURES)}")
    content = io.BytesIO()
    picture.savefig(content, format=kind)
    write_atomically(path, content.getvalue())


def wrapped(text: str, inches: float, size: float, *, most: int | None = None) -> list[str]:
    """Break a text between words into lines of about a width; the last of `most` lines ends in an ellipsis."""
    return textwrap.wrap(text, max(8, int(inches * 72 / size / LETTER)), break_on_hyphens=False, max_lines=most, placeholder=" …")


# Bars.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar with its interval; without a value, a gap with the reason; without a look, gray."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""
    """At the end of the bar."""
    look: Look | None = None
    heading: bool = False
    """Only a label, above the bars of a workload."""


def bar_of(label: str, estimate: Estimate | None, text: str, look: Look | None = None, *, scale: float = 1) -> Bar:
    """Return the bar of an estimate, in units of `scale`."""
    if estimate is None:
        return Bar(label=label, value=None, look=look)
    value, low, high = (None if end is None else end / scale for end in (estimate.value, *useful_ends(estimate)))
    return Bar(label=label, value=value, low=low, high=high, text=text, look=look)


LABEL_INCHES = 3.2
"""Width of a line next to the bars; a longer label takes several lines."""


def bars(axes: "Axes", rows: Sequence[Bar], panel_inches: float, *, labelled: bool = True) -> None:
    """Draw horizontal bars from the top down, with values at their ends, for which a panel of this width has room."""
    right = 0.0
    top = max((row.high or row.value for row in rows if row.value is not None), default=1.0)
    for place, row in enumerate(rows):
        text = len(row.text or MISSING) * SMALL * LETTER / 72 + 0.15
        right = max(right, ((row.high or row.value or 0) + top * 0.02) / max(0.2, 1 - text / panel_inches / ROOM))
        if row.value is not None:
            look = row.look or Look(REST, "-")
            axes.barh(place, row.value, height=0.7, color=look.color, edgecolor="white")
            axes.text((row.high or row.value) + top * 0.02, place, row.text, va="center", size=SMALL, in_layout=False)
            if row.low is not None and row.high is not None:
                arms = [[max(0.0, row.value - row.low)], [max(0.0, row.high - row.value)]]  # equal steps differ by rounding
                axes.errorbar(row.value, place, xerr=arms, color=INK, capsize=3, linewidth=1.2)
        elif not row.heading:
            axes.text(top * 0.01, place, row.text or MISSING, va="center", color=SOFT, style="italic", size=SMALL)
    labels = ["\n".join(wrapped(row.label, LABEL_INCHES, LABEL)) if labelled else "" for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0, labelsize=LABEL)
    for row, tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set(color=SOFT if row.heading else INK, fontstyle="italic" if row.heading else "normal")
    spare = max(0, 2 - len(rows)) / 2  # a single bar does not grow to fill its panel
    axes.set_ylim(len(rows) - 0.4 + spare, -0.6 - spare)
    axes.set_xlim(0, right)
    axes.grid(visible=False, axis="y")
    thousands(axes)


def thousands(axes: "Axes", *, vertical: bool = False, scale: float = 1) -> None:
    """Format a few ticks with thousands separators, in units of `scale`."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.yaxis if vertical else axes.xaxis
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:,.10g}"))


WIDTH, COLUMNS = 14, 2
"""Inches of a picture; panels in a row."""
BOLD = 1.15
"""Width of bold letters over that of others."""
MOST_LINES = 4
"""Of the name of a workload above its part of a panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """Where a panel is drawn."""

    part: "SubFigure"
    place: "SubplotSpec"
    labelled: bool
    """Whether the panel labels its rows: not where its left neighbor has the same ones."""
    inches: float
    """Width of the panel, with its labels."""

    def split(self, title: str, names: Sequence[str]) -> "list[Axes]":
        """Return one axes for each workload, side by side, under one title and their names."""
        grid = self.place.subgridspec(1, len(names))
        places = [grid[0, column] for column in range(len(names))] if len(names) > 1 else [self.place]  # neighbors share widths
        made = [self.part.add_subplot(place) for place in places]
        broken = [wrapped(name, self.inches / len(names) - 0.5, SMALL, most=MOST_LINES) for name in names]
        lines = max(map(len, broken))
        made[0].set_title(title + "\n" * lines)
        for axes, name in zip(made, broken, strict=True):
            padded = "\n".join([*name, *["\u00a0"] * (lines - len(name))])
            axes.set_title(padded, loc="center", x=0, ha="left", size=SMALL, weight="normal", style="italic", color=SOFT)
        return made

    def notes(self, axes: "Axes", first: str, notes: Sequence[str], parts: int = 1) -> None:
        """Name the horizontal axis of one of the `parts` of a panel, with notes below."""
        lines = [line for note in notes for line in wrapped(note, self.inches / parts - 0.4, SMALL)]
        axes.set_xlabel("\n".join([first, *lines]), size=SMALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of a picture, before it is drawn."""

    height: float
    """Of its row, in inches, with title and axis."""
    draw: Callable[[Canvas], None]
    rows: str = ""
    """What its rows are; neighbors with the same rows label them once. Empty: its rows have no labels."""
    present: bool = True
    """Whether it has anything to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A picture, before it is drawn."""

    title: str
    subtitle: str
    panels: Sequence[Panel]
    legend: Sequence[tuple[str, Look]] = ()
    notes: Sequence[str] = ()


def draw_sheet(sheet: Sheet, path: Path) -> None:
    """Draw a picture of at least one panel with data into a .png, .svg or .pdf file."""
    with drawn(sheet) as picture:
        save(picture, path)


@contextmanager
def drawn(sheet: Sheet) -> "Iterator[Figure]":
    """Draw the panels that have data, of which there is one at least; the picture can be saved inside the with statement."""
    from matplotlib.lines import Line2D

    chosen = [panel for panel in sheet.panels if panel.present]
    blocks = [list(rows) for _, rows in groupby(_rows(chosen), key=lambda row: (bool(row[0].rows), len(row)))]
    heights = [[max(panel.height for panel in row) for row in block] for block in blocks]
    headline, subtitle = wrapped(sheet.title, WIDTH / BOLD, HEADLINE), wrapped(sheet.subtitle, WIDTH, SUBTITLE)
    notes = [line for text in sheet.notes for line in wrapped(text, WIDTH, SMALL)]
    legend = () if all(panel.rows for panel in chosen) else sheet.legend  # rows say what they are
    words = (HEADLINE * len(headline) + SUBTITLE * (len(subtitle) + len(legend) / 3) + SMALL * len(notes)) * 1.25 / 72
    with figure(WIDTH, sum(map(sum, heights)) + words + 0.8) as picture:
        picture.supxlabel("\n".join(notes), x=LEFT, ha="left", size=SMALL, color=SOFT)
        picture.suptitle("\n".join(headline), x=LEFT, ha="left", size=HEADLINE, weight="bold")
        body = picture.add_subfigure(picture.add_gridspec(1, 1)[0, 0])
        body.suptitle("\n".join(subtitle), x=LEFT, ha="left", size=SUBTITLE, color=SOFT)
        if legend:
            handles = [Line2D([], [], color=look.color, linestyle=look.line, linewidth=2) for _, look in legend]
            names = [name for name, _ in legend]
            columns = max(1, int(WIDTH / (0.9 + max(map(len, names)) * 0.075)))
            body.legend(handles, names, loc="outside lower left", ncols=min(columns, len(names)), fontsize=SUBTITLE)
        parts = body.subfigures(len(blocks), 1, squeeze=False, height_ratios=list(map(sum, heights))).flat
        for part, block, tall in zip(parts, blocks, heights, strict=True):
            grid = part.add_gridspec(len(block), len(block[0]), height_ratios=tall)  # aligned below each other
            for line, row in enumerate(block):
                for column, panel in enumerate(row):
                    labelled = not (column and panel.rows and panel.rows == row[column - 1].rows)
                    panel.draw(Canvas(part=part, place=grid[line, column], labelled=labelled, inches=WIDTH / len(row)))
        yield picture


def _rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Fill rows with panels of the same rows."""
    rows: list[list[Panel]] = []
    for panel in panels:
        if rows and len(rows[-1]) < COLUMNS and rows[-1][0].rows == panel.rows:
            rows[-1].append(panel)
        else:
            rows.append([panel])
    return rows


@dataclass(frozen=True, slots=True)
class BarPanel:
    """Bars below each other, before they are drawn."""

    title: str
    axis: str
    rows: Sequence[Bar]

    def panel(self, which: str) -> Panel:
        """Return a panel of them; those whose rows are the same (`which`) label them once if they are side by side."""

        def draw(canvas: Canvas) -> None:
            (axes,) = canvas.split(self.title, [""])
            bars(axes, self.rows, canvas.inches, labelled=canvas.labelled)
            axes.set_xlabel(self.axis, size=SMALL)

        lines = max((len(wrapped(row.label, LABEL_INCHES, LABEL)) for row in self.rows), default=1)
        height = 1.1 + (0.15 + 0.15 * lines) * max(len(self.rows), 2)
        return Panel(height=height, draw=draw, rows=which, present=any(row.value is not None for row in self.rows))
