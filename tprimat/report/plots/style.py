"""One style for every picture: colours that colour-blind readers can distinguish, plain labels, no decoration."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tprimat.errors import RecordError, UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito 2008, jfly.uni-koeln.de/color: distinct with every common kind of colour blindness. Faint yellow comes late."""
LineStyle = Literal["-", "--", ":", "-."]
LINE_STYLES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx")
PICTURES = ("png", "svg", "pdf")
MISSING = "not recorded"

SETTINGS: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.dpi": 120,
    "svg.hashsalt": "tprimat",
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True, slots=True)
class Look:
    """How one group of runs is drawn in all panels."""

    colour: str
    line: LineStyle
    hatch: str


def looks(count: int) -> list[Look]:
    """Return a look per group: 32 pairs of colour and line, neighbours differing in both, so that covered lines show."""
    colours, lines = len(OKABE_ITO), len(LINE_STYLES)
    return [
        Look(OKABE_ITO[i % colours], LINE_STYLES[(i + i // colours) % lines], HATCHES[i // colours % len(HATCHES)])
        for i in range(count)
    ]


@contextmanager
def figure(width: float, height: float) -> Iterator["Figure"]:
    """Open an empty figure of a size in inches; needs no display."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    with mpl.rc_context(rc=cast(Any, SETTINGS)):
        picture = NewFigure(figsize=(width, height), layout="constrained")
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, metadata=undated)
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror or error}.", where=str(path)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar with its interval; without a value, a gap with the reason."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    text: str = ""
    """At the end of the bar."""


def bars(axes: "Axes", rows: Sequence[Bar], appearance: Sequence[Look]) -> None:
    """Draw horizontal bars from the top down, so that labels of any length stay legible, with 2 bars and with 20."""
    top = max((row.high or row.value for row in rows if row.value is not None), default=1.0)
    if all(row.value is None for row in rows):
        axes.set_xticks([])
    for place, (row, look) in enumerate(zip(rows, appearance, strict=True)):
        if row.value is None:
            axes.text(top * 0.01, place, row.text or MISSING, va="center", color="#555555", style="italic", size=8.5)
            continue
        axes.barh(place, row.value, height=0.7, color=look.colour, hatch=look.hatch, edgecolor="white")
        if row.low is not None and row.high is not None:
            arms = [[row.value - row.low], [row.high - row.value]]
            axes.errorbar(row.value, place, xerr=arms, color="#333333", capsize=3, linewidth=1.2)
        axes.text((row.high or row.value) + top * 0.015, place, row.text, va="center", size=8.5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, top * 1.5)
    axes.grid(visible=False, axis="y")


def nothing(axes: "Axes", text: str) -> None:
    """Draw an empty panel with the reason."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="#555555", style="italic", wrap=True)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
