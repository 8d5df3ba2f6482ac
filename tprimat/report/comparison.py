"""A comparison in words and figures: text for a terminal, Markdown, CSV and JSON."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tprimat import units
from tprimat.analyze.compare import Difference, Verdict
from tprimat.analyze.groups import Group, Measured, group_estimate, spread_between_runs
from tprimat.records.files import as_document
from tprimat.records.metrics import Estimate, RunMetrics
from tprimat.report.tables import columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that one comparison found."""

    groups: tuple[Group, ...]
    verdicts: tuple[Verdict, ...]
    not_counted: tuple[Measured, ...] = ()


Cell = Callable[[Group], str]


def with_interval(estimate: Estimate | None, show: Callable[[float], str]) -> str:
    """A number with its 95 % interval, or with the word that there is none."""
    if estimate is None:
        return units.ABSENT
    if estimate.low is None or estimate.high is None:
        return f"{show(estimate.value)} (n = 1)"
    return f"{show(estimate.value)} [{show(estimate.low)}, {show(estimate.high)}]"


def _metrics(group: Group) -> list[RunMetrics]:
    return [item.metrics for item in group.runs if item.metrics is not None]


def _worst(group: Group) -> int | None:
    return max((metrics.peak_memory_bytes for metrics in _metrics(group) if metrics.peak_memory_bytes), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None


def _loss(group: Group) -> str:
    value = _mean([metrics.final_loss for metrics in _metrics(group)])
    return units.ABSENT if value is None else f"{value:.3f}"


def _energy(group: Group) -> str:
    return units.si(_mean([metrics.joules_per_token for metrics in _metrics(group)]), "J")


def _share_of_measured(group: Group) -> str:
    return units.percent(_mean([metrics.share_of_measured_gemm for metrics in _metrics(group)]))


def _cost(group: Group) -> str:
    value = _mean([metrics.cost_per_million_tokens for metrics in _metrics(group)])
    return units.ABSENT if value is None else units.significant(value)


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("configuration", lambda group: group.label),
    ("runs", lambda group: str(len(group.runs))),
    ("steps", lambda group: str(sum(metrics.window.steps for metrics in _metrics(group)))),
    (
        "tokens/s/GPU",
        lambda group: with_interval(group_estimate(group, lambda m: m.tokens_per_second_per_gpu), units.significant),
    ),
    ("model FLOP/s/GPU", lambda group: with_interval(group_estimate(group, lambda m: m.model_flops_per_second_per_gpu), _flops)),
    ("MFU", lambda group: units.percent(getattr(group_estimate(group, lambda m: m.mfu), "value", None))),
    ("of measured matmul", _share_of_measured),
    ("step time", lambda group: units.seconds(getattr(group_estimate(group, lambda m: m.step_seconds), "value", None))),
    ("peak memory", lambda group: units.gibibytes(_worst(group))),
    ("loss", _loss),
    ("energy/token", _energy),
    ("cost/M tokens", _cost),
)
OPTIONAL = ("of measured matmul", "energy/token", "cost/M tokens", "MFU", "peak memory", "loss", "model FLOP/s/GPU")
"""Left out where no group has them."""
MOST_NAMED = 6
"""Runs that a note names; the rest are counted."""


def _flops(value: float) -> str:
    return units.teraflops(value).removesuffix("/s").replace("FLOP", "")


def rows_of(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and cells."""
    table = {name: [cell(group) for group in comparison.groups] for name, cell in COLUMNS}
    shown = [name for name in table if name not in OPTIONAL or any(cell != units.ABSENT for cell in table[name])]
    return shown, [list(row) for row in zip(*(table[name] for name in shown), strict=True)]


def text(comparison: Comparison) -> str:
    """For a terminal: aligned columns, then the verdicts, then what was left out."""
    header, rows = rows_of(comparison)
    lines = []
    if rows:
        lines.append(columns(header, rows))
        lines += ["", "[low, high]: 95 % interval, between runs where there are several, else between the steps of one run.", ""]
    lines += remarks(comparison)
    return "\n".join(lines) + "\n"


def remarks(comparison: Comparison) -> list[str]:
    """Verdicts, absent MFU, warnings and runs that do not count, a line each."""
    lines = [sentence(verdict) for verdict in comparison.verdicts]
    for group in comparison.groups:
        spread = spread_between_runs(group)
        if spread is not None:
            lines.append(
                f"Runs of {group.label} differ by {units.percent(spread, 2)} (standard deviation, {len(group.runs)} runs)."
            )
    lines += [f"{what}: {_some(places)}" for what, places in notes(comparison).items()]
    for item in comparison.not_counted:
        lines.append(f"Not counted: {run_name(item)}: {item.not_counted}")
    return lines


def notes(comparison: Comparison) -> dict[str, list[str]]:
    """Why an MFU is absent, and warnings -> where that is so. Each is said once, however many runs it is true of."""
    found: dict[str, list[str]] = {}
    for group in comparison.groups:
        for metrics in _metrics(group)[:1]:
            if metrics.mfu_absent_because is not None:
                found.setdefault(f"No MFU, {metrics.mfu_absent_because}", []).append(group.label)
    for item in (item for group in comparison.groups for item in group.runs):
        for warning in item.metrics.warnings if item.metrics else ():
            found.setdefault(f"Note, {warning}", []).append(run_name(item))
    return found


def _some(places: Sequence[str]) -> str:
    rest = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    return ", ".join(places[:MOST_NAMED]) + rest


def run_name(item: Measured) -> str:
    """The run's id; a file of another maker has none of its own, so its path."""
    return str(item.result.path) if item.result.path.is_file() else item.result.run.run_id


def sentence(verdict: Verdict) -> str:
    """A verdict in words."""
    pair = f"{verdict.candidate} against {verdict.baseline}"
    differing = "; ".join(difference(entry) for entry in verdict.differences)
    if verdict.outcome == "refused" or verdict.ratio is None:
        reason = differing or "tokens or GPUs of a run are not recorded"
        return f"Not compared: {pair}, because they differ: {reason}. (--even-if-different compares all the same.)"
    ratio = f"ratio {verdict.ratio.value:.3f}"
    if verdict.ratio.low is not None and verdict.ratio.high is not None:
        ratio += f", 95 % interval {verdict.ratio.low:.3f} to {verdict.ratio.high:.3f}"
    else:
        ratio += ", no interval from a single step"
    what = verdict.outcome if verdict.outcome == "no difference shown" else change(verdict.ratio.value)
    caution = f" They differ: {differing}." if differing else ""
    return f"{pair}: {what} ({ratio}; {verdict.evidence}).{caution}"


def change(ratio: float) -> str:
    """'12.0 % faster', '3.0 % slower', from twice the speed on '2.50 times as fast'."""
    if ratio >= 2:
        return f"{units.significant(ratio)} times as fast"
    return f"{units.percent(abs(ratio - 1))} {'faster' if ratio > 1 else 'slower'}"


def difference(entry: Difference) -> str:
    """One difference in words."""
    if entry.first is None and entry.second is None:
        return f"{entry.what} not recorded in either"
    first, second = ("not recorded" if value is None else _plain(value) for value in (entry.first, entry.second))
    return f"{entry.what} {first} and {second}"


def _plain(value: object) -> str:
    if isinstance(value, int):
        return units.count(value)
    return getattr(value, "name", None) or str(value)


def markdown(comparison: Comparison) -> str:
    """A table and a list."""
    header, rows = rows_of(comparison)
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] + ["---:"] * (len(header) - 1), *rows)]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks(comparison))]) + "\n"


def comma_separated(comparison: Comparison) -> str:
    """One line a run, SI units, unrounded, empty where absent."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run_id", "configuration", "counted", *CSV_FIELDS])
    for group in comparison.groups:
        for item in group.runs:
            writer.writerow([item.result.run.run_id, group.label, "yes", *_figures(item.metrics)])
    for item in comparison.not_counted:
        writer.writerow([item.result.run.run_id, "", f"no: {item.not_counted}", *_figures(item.metrics)])
    return out.getvalue()


CSV_FIELDS = (
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "model_flops_per_second_per_gpu",
    "mfu",
    "step_seconds",
    "step_seconds_mad",
    "peak_memory_bytes",
    "final_loss",
    "joules_per_token",
    "cost_per_million_tokens",
)


def _figures(metrics: RunMetrics | None) -> list[object]:
    values = [getattr(metrics, name, None) for name in CSV_FIELDS]
    return [value.value if isinstance(value, Estimate) else value for value in values]


def as_json(comparison: Comparison) -> str:
    """Groups with every run's metrics, verdicts, and what was left out."""
    document = {
        "groups": [
            {
                "label": group.label,
                "runs": [
                    {"run_id": item.result.run.run_id, "path": str(item.result.path), "metrics": as_document(item.metrics)}
                    for item in group.runs
                ],
            }
            for group in comparison.groups
        ],
        "verdicts": [
            asdict(verdict) | {"differences": [difference(entry) for entry in verdict.differences], "words": sentence(verdict)}
            for verdict in comparison.verdicts
        ],
        "not_counted": [
            {"run_id": item.result.run.run_id, "path": str(item.result.path), "because": item.not_counted}
            for item in comparison.not_counted
        ],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
