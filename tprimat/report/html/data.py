"""The data of the page's plots and of its comparison of two runs, compact enough for a hundred runs of 500 steps."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tprimat.analyze.groups import Group, Measured
from tprimat.records.schema import RunRecord
from tprimat.records.store import as_document
from tprimat.report.comparison import run_name
from tprimat.report.plots.comparison import CURVES, MOST_CURVES, BarPanel, Curve, memory_panel, throughput_panel
from tprimat.report.plots.style import MOST_SERIES, Look

DIGITS = 6
"""Significant digits of a plotted point; no screen shows more."""
OMITTED = ("schema_version", "run_id", "start_up")
ENVIRONMENT = ("machine", "software")


def page_data(groups: Sequence[Group], runs: Sequence[Measured], appearance: Sequence[Look]) -> dict[str, Any]:
    """Return the data as plain lists and dictionaries; absent values are None.

    Args:
        groups: in the order of the ranking, whose rows refer to them by place.
        runs: all runs, including those that do not count.
        appearance: one per group.
    """
    return {
        "groups": [_group(group, look) for group, look in zip(groups, appearance, strict=True)],
        "bars": [_bars(panel(groups)) for panel in (throughput_panel, memory_panel)] if groups else [],
        "curves": [
            {"title": curve.title, "unit": curve.unit, "steady": curve.steady, "span": curve.least_span} for curve in CURVES
        ],
        "most": MOST_SERIES,
        **_records(groups, runs),
    }


def _group(group: Group, look: Look) -> dict[str, Any]:
    return {"label": group.label, **asdict(look), "runs": [_series(item) for item in group.runs[:MOST_CURVES]]}


def _series(item: Measured) -> dict[str, Any]:
    steps = item.result.steps
    numbers = [step.step for step in steps]
    rising = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    return {
        "name": run_name(item),
        "first": None if item.metrics is None else item.metrics.window.first_step,
        "steps": (numbers[:1] or [1])[0] if rising else numbers,
        "curves": [_points(item, curve) for curve in CURVES],
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


def _records(groups: Sequence[Group], runs: Sequence[Measured]) -> dict[str, Any]:
    """Return the record of every run as {place in keys: text}, so that each key is written once."""
    label_of = {id(item): group.label for group in groups for item in group.runs}
    flat = [flatten(item.result.run) for item in runs]
    keys = list(dict.fromkeys(key for fields in flat for key in fields))
    place = {key: index for index, key in enumerate(keys)}
    return {
        "keys": [[section_of(key), key] for key in keys],
        "runs": [
            {
                "name": run_name(item),
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


def flatten(run: RunRecord) -> dict[str, str]:
    """Return the text of every field that is present, by its path."""
    found: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list | tuple):
            if value:
                found[path] = " ".join(map(str, value)) if path == "command" else "; ".join(map(str, value))
        elif value is not None:
            found[path] = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

    walk({key: value for key, value in as_document(run).items() if key not in OMITTED}, "")
    return found
