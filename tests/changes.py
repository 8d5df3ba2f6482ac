"""Records, evidence and plans for tests by plain facts: those of the workload find their place."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any, TypeVar

from tprimat.core.workload import FullWorkload, Layout, Workload
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Evidence, RunRecord

FACTS = {field.name for field in dataclasses.fields(FullWorkload)}
T = TypeVar("T")


def _work(facts: dict[str, Any]) -> dict[str, Any]:
    """Take the facts of a workload out of some; `layout` stands for its degrees."""
    work = {name: facts.pop(name) for name in list(facts) if name in FACTS}
    layout = facts.pop("layout", None)
    return ({} if layout is None else layout.facts) | work


def record(**facts: Any) -> RunRecord:
    """Return a record."""
    work = _work(facts)
    return RunRecord(workload=Workload(**work), **facts)


def evidence(source: str = "running_framework", **facts: Any) -> Evidence:
    """Return evidence."""
    work = _work(facts)
    return Evidence(source=source, workload=Workload(**work), **facts)


def replace(value: T, **changes: Any) -> T:
    """Return a record, evidence, plan or workload with changes, as dataclasses.replace does."""
    if isinstance(value, RunRecord | Evidence | RunPlan) and (work := _work(changes)):
        changes["workload"] = dataclasses.replace(value.workload, **work)
    elif isinstance(value, Workload) and isinstance(changes.get("layout"), Layout):
        changes |= changes.pop("layout").facts
    return dataclasses.replace(value, **changes)


def ran_with(run: RunRecord, **facts: Any) -> RunRecord:
    """Return a run that was asked for other facts of its workload and ran with them, as far as its evidence says any of them."""
    if run.evidence is not None:
        seen = {name: value for name, value in facts.items() if name in run.evidence.workload.facts}
        run = replace(run, evidence=replace(run.evidence, **seen))
    return replace(run, **facts)


def slowed(result: T, by: float | Sequence[float], **fields: Any) -> T:
    """Return a result whose steps take `by` times as long, all or each, at unknown moments; `fields` are of its run."""
    rows = zip(result.steps, itertools.repeat(by) if isinstance(by, int | float) else by, strict=False)
    steps = tuple(replace(step, step_seconds=step.step_seconds * factor, ended_at_seconds=None) for step, factor in rows)
    return replace(result, run=replace(result.run, **fields), steps=steps)


def groups_of(*results: Any) -> list[Any]:
    """Return the groups of those results that count."""
    from tprimat.analyze.groups import group_runs, measure
    from tprimat.analyze.metrics import MetricOptions

    return group_runs([measure(result, MetricOptions()) for result in results])


def jitter(name: str, count: int) -> list[float]:
    """Return factors by which the step times of a repetition differ from those of another."""
    rng = random.Random(name)
    return [rng.gauss(1, 0.002) for _ in range(count)]
