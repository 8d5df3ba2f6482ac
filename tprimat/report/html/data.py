"""The data of the page's plots, compact enough for a hundred runs of 500 steps."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tprimat.analyze.compare import Ranking
from tprimat.analyze.groups import Group, Measured
from tprimat.report.comparison import run_name
from tprimat.report.plots.comparison import MOST_CURVES, MOST_GROUPS, BarPanel, Curve, curves_of, memory_panel, throughput_panel
from tprimat.report.plots.style import MOST_SERIES, Look

DIGITS = 6
"""Significant digits of a plotted point; no screen shows more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """The panels of a page that have data."""

    bars: Sequence[BarPanel]
    curves: Sequence[Curve]


def shown_panels(groups: Sequence[Group]) -> Panels:
    """Return the panels for which a run that counts has a value."""
    runs = [item.result for group in groups for item in group.runs]
    made = [panel(groups) for panel in (throughput_panel, memory_panel)] if groups else []
    return Panels(
        bars=[panel for panel in made if any(row.value is not None for row in panel.rows)],
        curves=[curve for curve in curves_of(groups) if any(curve.value(step) is not None for run in runs for step in run.steps)],
    )


def page_data(rankings: Sequence[Ranking], runs: Sequence[Measured], appearance: Sequence[Look]) -> dict[str, Any]:
    """Return the data as plain lists and dictionaries; absent values are None.

    Rows of the ranking refer to groups by their place in `rankings`; each group has a look.
    """
    groups = [group for ranking in rankings for group in ranking.groups]
    work = [place for place, ranking in enumerate(rankings) for _ in ranking.groups]
    panels = shown_panels(groups)
    names = short_names(runs)
    return {
        "groups": [
            {
                "label": group.label,
                **_title_and_name(group),
                "work": place,
                **asdict(look),
                "runs": [_series(item, panels, names) for item in group.runs[:MOST_CURVES]],
            }
            for group, place, look in zip(groups, work, appearance, strict=True)
        ],
        "bars": [_bars(panel) for panel in panels.bars],
        "curves": [{"title": one.title, "unit": one.unit, "steady": one.steady, "span": one.least_span} for one in panels.curves],
        "most": MOST_SERIES,
        "mostBars": MOST_GROUPS,
    }


def _title_and_name(group: Group) -> dict[str, str]:
    """Return the workload of a label, empty where there is only one, and the configuration."""
    title, _, name = group.label.rpartition(": ")
    return {"title": title, "name": name}


def short_names(runs: Sequence[Measured]) -> dict[str, str]:
    """Return a short name by the whole one: the id without the moment of its start, or the folder that tells files apart.

    A run whose short name another one has as well keeps its whole name.
    """
    files = [item.result.path.parts for item in runs if item.result.path.is_file()]
    common = next((place for place, parts in enumerate(zip(*files, strict=False)) if len(set(parts)) > 1), -2)
    short = {run_name(item): _short_name(item, common) for item in runs}
    times = Counter(short.values())
    return {whole: brief if times[brief] == 1 else whole for whole, brief in short.items()}


def _short_name(item: Measured, common: int) -> str:
    path = item.result.path
    if not path.is_file():
        return re.sub(r"^\d{8}-\d{6}-\d+-", "", item.result.run.run_id)
    folders = path.parts[common:-1]
    return "/".join(folders) or path.name


def _series(item: Measured, panels: Panels, names: Mapping[str, str]) -> dict[str, Any]:
    steps = item.result.steps
    numbers = [step.step for step in steps]
    rising = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    return {
        "name": names[run_name(item)],
        "first": None if item.metrics is None else item.metrics.window.first_step,
        "steps": (numbers[:1] or [1])[0] if rising else numbers,
        "curves": [_points(item, curve) for curve in panels.curves],
    }


def _points(item: Measured, curve: Curve) -> list[float | None]:
    values = [curve.value(step) for step in item.result.steps]
    return [] if all(value is None for value in values) else [_short(value) for value in values]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _bars(panel: BarPanel) -> dict[str, Any]:
    keys = ("value", "low", "high")
    return {
        "title": panel.title,
        "axis": panel.axis,
        "rows": [{**{key: _short(getattr(row, key)) for key in keys}, "text": row.text} for row in panel.rows],
    }
