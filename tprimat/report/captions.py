"""Words of a picture: a headline with the finding for each workload, and a subtitle with what the runs were."""

from collections.abc import Sequence

from tprimat.analyze.compare import throughput
from tprimat.analyze.groups import on_cpu
from tprimat.analyze.traits import machine_name, model_name
from tprimat.core import units
from tprimat.report import words
from tprimat.report.catalogue import MFU
from tprimat.report.names import Workload, engine_name, heading
from tprimat.report.tables import plural

MOST_HEADLINES = 2
"""Workloads that a headline speaks of."""


def headline(works: Sequence[Workload]) -> list[str]:
    """Return the finding, in one line for each workload, at most MOST_HEADLINES."""
    if not works:
        return ["No run counts"]
    lines = [_finding(work) for work in works[:MOST_HEADLINES]]
    more = len(works) - MOST_HEADLINES
    lines[-1] += f"; {plural(more, 'more workload')}" if more > 0 else ""
    return lines


def _finding(work: Workload) -> str:
    """Say who leads; of a single configuration its speed, which a CPU does not show."""
    rate, gpus, share = throughput(work.ranking.best), work.run.machine.gpus, MFU.value(work.ranking.best)
    subject = work.title or model_name(work.run)
    if on_cpu(work.ranking.groups):
        return f"{subject} trains on {machine_name(work.run)}; a CPU does not show how fast it trains"
    if work.ranking.lead is not None:
        return f"{work.title}: {words.headline(work.ranking)[0]}" if work.title else words.headline(work.ranking)[0]
    if rate is None or gpus is None:
        return f"{subject}: throughput not known"
    part = f" ({units.percent(share)} of the dense peak)" if share is not None else ""
    return f"{subject} trains at {units.count(rate.value * gpus)} tokens/s on {machine_name(work.run)}{part}"


def subtitle(works: Sequence[Workload]) -> list[str]:
    """Return what ran; when, and how often; and in what the configurations differ."""
    groups = [one.group for work in works for one in work.configurations]
    measured = [item for group in groups for item in group.runs]
    if not measured:
        return []
    days = sorted({item.result.run.started_at[:10] for item in measured if item.result.run.started_at})
    steps = sum(item.metrics.window.steps for item in measured if item.metrics)
    amount = [
        " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
        plural(len(groups), "configuration"),
        plural(len(measured), "run"),
        f"n = {plural(steps, 'steady step')}",
        f"95 % intervals over {'runs where there are several' if len(measured) > len(groups) else 'steps'}",
    ]
    judged = [verdict for work in works for verdict in work.ranking.against_best if verdict is not None]
    engines = ", ".join(dict.fromkeys(engine_name(group.run) for group in groups))
    what = [f"{heading(work.ranking)} · {engines}" for work in works[:MOST_HEADLINES]]
    return [*what, " · ".join(filter(None, amount)), *words.differing_traits(judged)]
