"""What the pages made from recorded results share: selecting runs and formatting figures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tprimat.analyze.groups import Group, group_estimate, group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.probes import under_ceiling
from tprimat.core.statistics import FEWEST_RUNS
from tprimat.records.discover import load_results, probes_in
from tprimat.records.schema import Estimate, ProbeRecord
from tprimat.report.tables import with_interval

NOTHING = "Nothing is recorded yet."
OURS = ("engine", "fp8", "one-gpu")
"""Folders of the embedded engine's layouts. fp8 runs and bf16 states have their own, since they are not ranked with the rest."""


def probes_of(results: Path) -> list[ProbeRecord]:
    """Read all probes among the results."""
    return probes_in(sorted(results.glob("probes*")))[0]


def groups_in(folder: Path, probes: Sequence[ProbeRecord]) -> list[Group]:
    """Read the runs of a folder and group repetitions."""
    results, problems = load_results([folder] if folder.is_dir() else [])
    for problem in problems:
        raise SystemExit(str(problem))
    return group_runs([measure(result, under_ceiling(MetricOptions(), result.run, probes)) for result in results])


def engine_groups(results: Path, probes: Sequence[ProbeRecord] = ()) -> list[Group]:
    """Read the embedded engine's runs of the layouts."""
    return [group for folder in OURS for group in groups_in(results / folder, probes)]


def by_layout(groups: Sequence[Group]) -> Mapping[str, Group]:
    """Return the newest group of each layout, which is named by the runs' strategy."""
    ordered = sorted(groups, key=lambda group: group.run.started_at or "")
    return {group.run.strategy or "": group for group in ordered}


def rate(group: Group) -> Estimate | None:
    """Return tokens/s/GPU."""
    return group_estimate(group, lambda run: run.tokens_per_second_per_gpu)


def steps(group: Group) -> str:
    """Write the number of steady steps of each run."""
    return "+".join(str(item.metrics.window.steps) for item in group.runs if item.metrics)


def repeated(estimate: Estimate | None, show: Callable[[float], str], *groups: Group) -> str:
    """Write a figure with its interval where each group behind it ran FEWEST_RUNS times, and the figure alone elsewhere.

    The interval of one run is that of its steps; a reader would take it for that of the next run.
    """
    if estimate is None or min(len(group.runs) for group in groups) >= FEWEST_RUNS:
        return with_interval(estimate, show)
    return show(estimate.value)


def times(value: float) -> str:
    """Write a ratio."""
    return f"{value:.3f}"
