"""Records, evidence and plans for tests by plain facts: those of the workload find their place."""

import dataclasses
import random
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


def jitter(name: str, count: int) -> list[float]:
    """Return factors by which the step times of a repetition differ from those of another."""
    rng = random.Random(name)
    return [rng.gauss(1, 0.002) for _ in range(count)]
