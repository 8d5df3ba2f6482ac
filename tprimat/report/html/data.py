"""The data of the page's plots and of its comparison of two runs, compact enough for a hundred runs of 500 steps."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tprimat.analyze.compare import Ranking
from tprimat.analyze.groups import Group, Measured
from tprimat.core import units
from tprimat.records.schema import RunRecord, TelemetrySample
from tprimat.records.store import as_document
from tprimat.report.comparison import run_name
from tprimat.report.plots.comparison import MOST_CURVES, MOST_GROUPS, BarPanel, Curve, curves_of, memory_panel, throughput_panel
from tprimat.report.plots.style import MOST_SERIES, Look

DIGITS = 6
"""Significant digits of a plotted point; no screen shows more."""
MOST_READINGS = 400
"""Points of telemetry of one run; a curve has no more pixels."""
LEAST_SECONDS = 0.25
"""Readings of several GPUs this close belong to one moment."""
OMITTED = ("schema_version", "run_id", "start_up")
ENVIRONMENT = ("machine", "software", "environment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One panel of telemetry over time."""

    title: str
    unit: str
    value: Callable[[TelemetrySample], float | None]


READINGS = (
    Reading(title="Power of a GPU, mean", unit="watts", value=lambda sample: sample.power_watts),
    Reading(title="Clock of a GPU, mean", unit="MHz", value=lambda sample: sample.clock_hertz and sample.clock_hertz / 1e6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """The panels of a page that have data."""

    bars: Sequence[BarPanel]
    curves: Sequence[Curve]
    readings: Sequence[Reading]


def shown_panels(groups: Sequence[Group]) -> Panels:
    """Return the panels for which a run that counts has a value."""
    runs = [item.result for group in groups for item in group.runs]
    made = [panel(groups) for panel in (throughput_panel, memory_panel)] if groups else []
    return Panels(
        bars=[panel for panel in made if any(row.value is not None for row in panel.rows)],
        curves=[curve for curve in curves_of(groups) if any(curve.value(step) is not None for run in runs for step in run.steps)],
        readings=[one for one in READINGS if any(one.value(sample) is not None for run in runs for sample in run.telemetry)],
    )


def page_data(rankings: Sequence[Ranking], runs: Sequence[Measured], appearance: Sequence[Look]) -> dict[str, Any]:
    """Return the data as plain lists and dictionaries; absent values are None.

    Rows of the ranking refer to groups by their place in `rankings`; `runs` are all, counted or not; each group has a look.
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
        "times": [{"title": one.title, "unit": one.unit, "steady": False, "span": 0.1} for one in panels.readings],
        "most": MOST_SERIES,
        "mostBars": MOST_GROUPS,
        **_records(groups, runs, names),
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
        "times": [_over_time(item.result.telemetry, reading) for reading in panels.readings],
    }


def _points(item: Measured, curve: Curve) -> list[float | None]:
    values = [curve.value(step) for step in item.result.steps]
    return [] if all(value is None for value in values) else [_short(value) for value in values]


def _over_time(samples: Sequence[TelemetrySample], reading: Reading) -> list[list[float | None]]:
    """Return seconds and values: the mean over the GPUs, and over neighbours where there are more than MOST_READINGS moments."""
    found = [(sample.at_seconds, value) for sample in samples if (value := reading.value(sample)) is not None]
    if not found:
        return [[], []]
    first, last = min(at for at, _ in found), max(at for at, _ in found)
    width = max((last - first) / MOST_READINGS, LEAST_SECONDS)
    bins: dict[int, list[tuple[float, float]]] = {}
    for at, value in found:
        bins.setdefault(int((at - first) / width), []).append((at, value))
    rows = [bins[place] for place in sorted(bins)]
    return [[_short(sum(pair[which] for pair in row) / len(row)) for row in rows] for which in (0, 1)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _bars(panel: BarPanel) -> dict[str, Any]:
    keys = ("value", "low", "high")
    return {
        "title": panel.title,
        "axis": panel.axis,
        "rows": [{**{key: _short(getattr(row, key)) for key in keys}, "text": row.text} for row in panel.rows],
    }


def _records(groups: Sequence[Group], runs: Sequence[Measured], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of every run as {place in keys: text}, so that each key is written once."""
    label_of = {id(item): group.label for group in groups for item in group.runs}
    flat = [flatten(item.result.run) for item in runs]
    keys = list(dict.fromkeys(key for fields in flat for key in fields))
    place = {key: index for index, key in enumerate(keys)}
    return {
        "keys": [[section_of(key), key] for key in keys],
        "runs": [
            {
                "name": names[run_name(item)],
                "label": label_of.get(id(item), f"not counted: {item.result.run.outcome.replace('_', ' ')}"),
                "fields": {str(place[key]): text for key, text in fields.items()},
            }
            for item, fields in zip(runs, flat, strict=True)
        ],
    }


def section_of(key: str) -> str:
    """Return the section in which the comparison of two runs lists a field."""
    first = key.split(".", maxsplit=1)[0]
    if first in ENVIRONMENT:
        return "environment"
    return "evidence" if first == "evidence" else "configuration"


def _plain(value: Any, path: str = "") -> str:
    """Write a value: seconds with their unit, another number that is not whole with the digits that a reader can use."""
    if path.endswith("_seconds") and isinstance(value, int | float):
        return units.seconds(value)
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else str(value)


def flatten(run: RunRecord) -> dict[str, str]:
    """Return the text of every field that is present, by its path."""
    found: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list | tuple):
            if value:
                found[path] = (" " if path == "command" else "; ").join(_plain(one, path) for one in value)
        elif value is not None:
            found[path] = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _plain(value, path)

    walk({key: value for key, value in as_document(run).items() if key not in OMITTED}, "")
    return found
