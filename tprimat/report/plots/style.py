"""One style for every picture: colours that colour-blind readers can distinguish, plain labels, light or dark paper."""

import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tprimat.core.errors import UserError
from tprimat.records.store import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#A89400", "#8A5FBF")
"""Six of Okabe and Ito 2008 (jfly.uni-koeln.de/color), a darker yellow that shows on white, and a violet that shows on black."""
LineStyle = Literal["-", "--", ":", "-."]
LINE_STYLES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx")
PICTURES = ("png", "svg", "pdf")
MISSING = "not recorded"
MOST_SERIES = 8
"""Configurations that get a colour; the others are named, and grey."""
FIRST = ("minimal_communication", "maximum_performance", "balanced", "memory_optimized", "truly_identical")
"""The strategies of the shipped configuration, each with its own colour."""
LOG_MARKS = ((1, 2, 5), (1, 1.5, 2, 3, 5, 7))
"""Multiples of powers of ten that a logarithmic axis marks: the first ones that mark it FEWEST_MARKS times."""
FEWEST_MARKS = 3
SMALL, LABEL = 8.5, 9
"""Sizes of text in points: notes and values; labels of rows."""
DOTS_PER_INCH = 120
POINTS_PER_INCH = 72

SETTINGS: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "savefig.dpi": DOTS_PER_INCH,
    "svg.hashsalt": "tprimat",
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
}


@dataclass(frozen=True, slots=True)
class Paper:
    """The colours of a picture that are not those of a configuration."""

    page: str
    ink: str
    soft: str
    """Of notes and ticks."""
    rule: str
    rest: str
    """Of bars and dots without a colour of their own."""


LIGHT = Paper(page="#ffffff", ink="#16202c", soft="#566474", rule="#dde2e8", rest="#b9c0c8")
DARK = Paper(page="#151b22", ink="#e6ebf1", soft="#9fadbc", rule="#303b47", rest="#56616d")
"""As on the HTML page."""


@dataclass(frozen=True, slots=True)
class Look:
    """How one group of runs is drawn in all panels."""

    colour: str
    line: LineStyle
    hatch: str


def looks(count: int) -> list[Look]:
    """Return a look per group: 32 pairs of colour and line, neighbours differing in both, so that covered lines show."""
    colours, lines = len(PALETTE), len(LINE_STYLES)
    return [
        Look(PALETTE[i % colours], LINE_STYLES[(i + i // colours) % lines], HATCHES[i // colours % len(HATCHES)])
        for i in range(count)
    ]


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """Return a look for each of the first MOST_SERIES names.

    A name has the same colour in every picture in which no other name claims it, whatever was measured. Up to four names differ
    in their lines too; of more, the first four do.
    """
    shown = list(dict.fromkeys(names))[:MOST_SERIES]
    every, taken = looks(MOST_SERIES), dict[int, str]()
    for name in sorted(shown, key=lambda name: (_claim(name) >= len(FIRST), name)):
        place = _claim(name)
        while place in taken:
            place = (place + 1) % MOST_SERIES
        taken[place] = name
    place_of = {name: place for place, name in taken.items()}
    lines: list[LineStyle] = []
    for name in shown:
        own = every[place_of[name]].line
        free = [line for line in LINE_STYLES if line not in lines]
        lines.append(own if own in free or not free else free[0])
    return {name: replace(every[place_of[name]], line=line) for name, line in zip(shown, lines, strict=True)}


def _claim(name: str) -> int:
    return FIRST.index(name) if name in FIRST else zlib.crc32(name.encode()) % MOST_SERIES


def readable_log_ticks(axes: "Axes") -> None:
    """Mark a logarithmic vertical axis at 1, 2, 5 and their decades; at more places where those leave fewer than three marks."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    locators = [*(LogLocator(base=10, subs=subs) for subs in LOG_MARKS), MaxNLocator(nbins=5)]
    marks = [sum(low <= mark <= high for mark in locator.tick_values(low, high)) for locator in locators]
    best = next((place for place, count in enumerate(marks) if count >= FEWEST_MARKS), -1)
    axes.yaxis.set_major_locator(locators[best])
    axes.yaxis.set_minor_locator(NullLocator())


@contextmanager
def figure(width: float, height: float, paper: Paper = LIGHT) -> Iterator["Figure"]:
    """Open an empty figure of a size in inches; needs no display."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    tones = {
        "figure.facecolor": paper.page,
        "axes.facecolor": paper.page,
        "text.color": paper.ink,
        "axes.labelcolor": paper.soft,
        "axes.edgecolor": paper.soft,
        "xtick.color": paper.soft,
        "ytick.color": paper.soft,
        "ytick.labelcolor": paper.ink,
        "grid.color": paper.rule,
    }
    with mpl.rc_context(rc=cast(Any, SETTINGS | tones)):
        picture = NewFigure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(picture)
        yield picture


def save(picture: "Figure", path: Path) -> None:
    """Write a picture in the format of its suffix, with the same bytes for the same data.

    Raises:
        RecordError: the file cannot be written.
        UserError: the suffix names no picture format.
    """
    kind = path.suffix.lstrip(".").lower()
    if kind not in PICTURES:
        raise UserError(f"{path} is not a picture.", why=f"Its suffix is {path.suffix!r}.", fix=f"one of {', '.join(PICTURES)}")
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    content = io.BytesIO()
    picture.savefig(content, format=kind, metadata=undated)
    write_atomically(path, content.getvalue())


# Text of a known width.


@cache
def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Return the width of a line in inches: as outlines or as pixels, which hinting makes up to 3 % wider."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size, weight=weight)
    outlines, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    pixels, _, _ = cast(Any, RendererAgg)(1, 1, DOTS_PER_INCH).get_text_width_height_descent(text, font, ismath=False)
    return max(float(outlines) / POINTS_PER_INCH, float(pixels) / DOTS_PER_INCH)


def wrapped(text: str, inches: float, size: float, weight: str = "normal", most: int | None = None) -> list[str]:
    """Break a text into lines of a width: after commas, else between words; the last of `most` lines ends in an ellipsis."""
    lines: list[str] = []
    parts = [part if text_width(f"{part},", size, weight) > inches else part.replace(" ", NO_BREAK) for part in text.split(", ")]
    for word in ", ".join(parts).split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, weight) <= inches:
            lines[-1] = longer
        else:
            lines += _pieces(word, inches, size, weight)
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], _shortened(" ".join(lines[most - 1 :]), inches, size, weight)]
    return [line.replace(NO_BREAK, " ") for line in lines]


def _pieces(word: str, inches: float, size: float, weight: str) -> list[str]:
    """Break one word that is longer than a line."""
    pieces = [""]
    for letter in word:
        if pieces[-1] and text_width(pieces[-1] + letter, size, weight) > inches:
            pieces.append("")
        pieces[-1] += letter
    return pieces


NO_BREAK = "\u00a0"


def _shortened(text: str, inches: float, size: float, weight: str) -> str:
    while text and text_width(f"{text}…", size, weight) > inches:
        text = text[:-1]
    return f"{text.rstrip()}…"


# Bars.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar with its interval; without a value, a gap with the reason; without a look, grey."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""
    """At the end of the bar."""
    look: Look | None = None
    heading: bool = False
    """Only a label, above the bars of a workload."""


LEAST_ROWS = 2
"""Fewer bars do not grow to fill the height of their panel."""
LABEL_INCHES = 3.9
"""Width of a line next to the bars; a longer label takes several lines."""


def rows_height(rows: Sequence[Bar], inches: float = LABEL_INCHES) -> float:
    """Return the inches that rows need, with title and axis of their panel."""
    lines = max((len(wrapped(row.label, inches, LABEL)) for row in rows), default=1)
    return 1.1 + (0.15 + 0.15 * lines) * max(len(rows), 2)


def bars(
    axes: "Axes", rows: Sequence[Bar], paper: Paper = LIGHT, *, inches: float | None = LABEL_INCHES, height: float = 0.7
) -> None:
    """Draw horizontal bars from the top down, so that labels of any length stay legible, with 2 bars and with 20.

    The axis ends where the longest text ends, once `fit_texts` has been called. Labels are so many `inches` wide, None leaves
    them out; `height` is that of a bar as a share of its row.
    """
    top = max((row.high or row.value for row in rows if row.value is not None), default=1.0)
    for place, row in enumerate(rows):
        if row.value is None and not row.heading:
            note = axes.text(top * 0.01, place, row.text or MISSING, va="center", color=paper.soft, style="italic", size=SMALL)
            note.set_gid(ENDS)
        elif row.value is not None:
            _bar(axes, place, row, paper, height)
            axes.text((row.high or row.value) + top * 0.02, place, row.text, va="center", size=SMALL).set_gid(ENDS)
    _bar_labels(axes, rows, paper, inches)
    spare = max(0, LEAST_ROWS - len(rows)) / 2
    axes.set_ylim(len(rows) - 0.4 + spare, -0.6 - spare)
    axes.set_xlim(0, top * 1.02)
    axes.grid(visible=False, axis="y")
    if all(row.value is None for row in rows):
        axes.set_xticks([])
    thousands(axes)


def _bar(axes: "Axes", place: int, row: Bar, paper: Paper, height: float) -> None:
    look = row.look or Look(paper.rest, "-", "")
    axes.barh(place, row.value or 0, height=height, color=look.colour, hatch=look.hatch, edgecolor=paper.page)
    if row.value is not None and row.low is not None and row.high is not None:
        arms = [[row.value - row.low], [row.high - row.value]]
        axes.errorbar(row.value, place, xerr=arms, color=paper.ink, capsize=3, linewidth=1.2)


def _bar_labels(axes: "Axes", rows: Sequence[Bar], paper: Paper, inches: float | None) -> None:
    labels = ["" if inches is None else "\n".join(wrapped(row.label, inches, LABEL)) for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0, labelsize=LABEL)
    for row, tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set_color(paper.soft if row.heading else paper.ink)
        tick.set_fontstyle("italic" if row.heading else "normal")


ENDS = "end-of-bar"
"""Marks texts that `fit_texts` keeps inside."""


def fit_texts(axes: "Axes") -> None:
    """End the axis where the longest text at a bar ends. The layout of the figure must be known."""
    left, right = axes.get_xlim()
    width = axes.get_window_extent().width
    texts = [(text.get_position()[0], text.get_window_extent().width + 6) for text in axes.texts if text.get_gid() == ENDS]
    needed = [start / max(0.12, 1 - pixels / width) for start, pixels in texts]
    axes.set_xlim(left, max([right, *needed]))


def thousands(axes: "Axes", *, vertical: bool = False, scale: float = 1) -> None:
    """Format ticks with thousands separators and equal decimals (12,000; 0.5, 1.0), in units of `scale`, and only a few of them.

    The axis has its limits; one without ticks stays empty.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.yaxis if vertical else axes.xaxis

    def text(value: float, _: int | None) -> str:
        numbers = [float(place) / scale for place in axis.get_majorticklocs()]
        need = next((n for n in range(8) if all(abs(round(one, n) - one) < 1e-9 * max(1, abs(one)) for one in numbers)), 8)
        return f"{value / scale:,.{need}f}"

    if len(axis.get_ticklocs()):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(text))


def place_labels(
    axes: "Axes", points: Sequence[tuple[float, float, str]], size: float = 8, *, vertical: bool = False
) -> "list[Text]":
    """Label points (x, y, label) so that no label leaves the axes or covers a point or another label.

    The most important point comes first; one without room has no label. The layout of the figure and the axes' limits must be
    known. Vertical: above and below only, because points are in rows.
    """
    from matplotlib.transforms import Bbox

    inside = axes.get_window_extent()
    spots = [axes.transData.transform((x, y)) for x, y, _ in points]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in spots]
    drawn: list[Text] = []
    for (x, y, label), own in zip(points, list(taken), strict=True):
        for dx, dy, ha, va in ABOVE_OR_BELOW if vertical else OFFSETS:
            text = axes.annotate(label, (x, y), (dx, dy), textcoords="offset points", ha=ha, va=va, size=size, clip_on=False)
            box = text.get_window_extent()
            free = all(other is own or not box.overlaps(other) for other in taken)
            if free and inside.x0 <= box.x0 and box.x1 <= inside.x1 + 4 and inside.y0 <= box.y0 and box.y1 <= inside.y1:
                taken.append(box)
                drawn.append(text)
                break
            text.remove()
    return drawn


OFFSETS = (
    (8, 0, "left", "center"),
    (-8, 0, "right", "center"),
    (0, 8, "center", "bottom"),
    (0, -8, "center", "top"),
    (7, 7, "left", "bottom"),
    (7, -7, "left", "top"),
    (-7, 7, "right", "bottom"),
    (-7, -7, "right", "top"),
)
"""Of a label from its point, in points, in the order of preference."""
ABOVE_OR_BELOW = tuple(
    (dx, dy, ha, va) for dy, va in ((12, "bottom"), (-12, "top")) for dx, ha in ((0, "center"), (6, "right"), (-6, "left"))
)
