"""Lay out a picture: headline, subtitle, panels in rows without gaps, legend and notes. A panel without data takes no place."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.core.errors import ConfigError
from tprimat.report.plots.style import HEADLINE, LEFT, MOST_SERIES, SMALL, SOFT, SUBTITLE, Look, figure, save, titled, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.gridspec import SubplotSpec

WIDTH, COLUMNS = 14, 2
"""Inches of a picture; panels in a row."""
BOLD = 1.15
"""Width of bold letters over that of others."""
SIMILAR = 2.3
"""Ratio of heights up to which panels share a row."""
MOST_LINES = 4
"""Of the name of a workload above its part of a panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """Where a panel is drawn."""

    part: "SubFigure"
    place: "SubplotSpec"
    labelled: bool
    """Whether the panel labels its rows: not where its left neighbour has the same ones."""
    inches: float
    """Width of the panel, with its labels."""

    def axes(self, title: str) -> "Axes":
        """Return the only axes of a panel."""
        return self.split(title, [""])[0]

    def split(self, title: str, names: Sequence[str]) -> "list[Axes]":
        """Return one axes for each workload, side by side, under one title and their names."""
        if len(names) == 1:  # neighbours share the width of their axes
            made = [self.part.add_subplot(self.place)]
        else:
            grid = self.place.subgridspec(1, len(names))
            made = [self.part.add_subplot(grid[0, column]) for column in range(len(names))]
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


def draw_sheet(sheet: Sheet, path: Path, *, panels: Sequence[str] | None = None) -> None:
    """Draw a picture into a .png, .svg or .pdf file: the named panels, or all that have data, of which there is one at least.

    Raises:
        ConfigError: a panel that does not exist, or only panels without data.
        UserError: another suffix, or a folder that cannot be written.
    """
    with drawn(sheet, panels) as picture:
        save(picture, path)


@contextmanager
def drawn(sheet: Sheet, panels: Sequence[str] | None = None) -> "Iterator[Figure]":
    """Draw a picture; it can be saved inside the with statement."""
    chosen = chosen_panels(sheet.panels, panels)
    rows = _rows(chosen)
    heights = [max(panel.height for panel in row) for row in rows]
    headline = [line for text in sheet.headline for line in wrapped(text, WIDTH / BOLD, HEADLINE)]
    subtitle = [line for text in sheet.subtitle for line in wrapped(text, WIDTH, SUBTITLE)]
    notes = [line for text in sheet.notes for line in wrapped(text, WIDTH, SMALL)]
    legend = () if all(panel.rows for panel in chosen) else sheet.legend  # rows say what they are
    words = (HEADLINE * len(headline) + SUBTITLE * (len(subtitle) + len(legend) / 3) + SMALL * len(notes)) * 1.25 / 72
    with figure(WIDTH, sum(heights) + words + 0.8) as picture:
        picture.supxlabel("\n".join(notes), x=LEFT, ha="left", size=SMALL, color=SOFT)
        body = titled(picture, "\n".join(headline), "\n".join(subtitle))
        _draw_legend(body, legend)
        for part, row in zip(body.subfigures(len(rows), 1, squeeze=False, height_ratios=heights).flat, rows, strict=True):
            grid = part.add_gridspec(1, len(row))
            for column, panel in enumerate(row):
                labelled = not (column and panel.rows and panel.rows == row[column - 1].rows)
                panel.draw(Canvas(part=part, place=grid[0, column], labelled=labelled, inches=WIDTH / len(row)))
        yield picture


def _rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Fill rows with panels of the same rows and of similar height; a panel of a whole row has it alone."""
    rows: list[list[Panel]] = []
    for panel in sorted(panels, key=lambda panel: panel.whole_row):
        row = rows[-1] if rows else []
        alike = row and row[0].rows == panel.rows and not panel.whole_row
        heights = [other.height for other in (*row, panel)]
        if alike and len(row) < COLUMNS and max(heights) <= SIMILAR * min(heights):
            row.append(panel)
        else:
            rows.append([panel])
    return rows


def _draw_legend(body: "SubFigure", entries: Sequence[tuple[str, Look]]) -> None:
    from matplotlib.lines import Line2D

    if not entries:
        return
    names = [name for name, _ in entries]
    handles = [Line2D([], [], color=look.colour, linestyle=look.line, linewidth=2) for _, look in entries]
    columns = max(1, int(WIDTH / (0.9 + max(map(len, names)) * 0.075)))
    body.legend(handles, names, loc="outside lower left", ncols=min(columns, len(names)), fontsize=SUBTITLE)


def rest_note(named: int) -> str:
    """Return the note about configurations without a colour of their own."""
    return f"Grey: {named} more configurations; the {MOST_SERIES} in colour are the fastest of each workload."
