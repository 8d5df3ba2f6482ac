"""Words of a picture: a headline with the finding for each workload, and a subtitle with what the runs were."""

from collections.abc import Callable, Sequence

from tprimat.analyze.compare import throughput
from tprimat.analyze.groups import Group, on_cpu
from tprimat.analyze.traits import dtype_that_ran, few, layout, machine_name, model_name, on_nodes
from tprimat.core import units
from tprimat.records.schema import RunRecord
from tprimat.report import words
from tprimat.report.catalogue import MFU, TOKENS
from tprimat.report.names import Workload, engine_name
from tprimat.report.tables import is_vague, plural

MOST_LISTED = 3
"""Values of a trait that a subtitle lists; more are counted."""
MOST_HEADLINES = 2
"""Workloads that a headline speaks of."""


def headline(works: Sequence[Workload]) -> list[str]:
    """Return the finding, in one line for each workload, at most MOST_HEADLINES."""
    if not works:
        return ["No run counts"]
    if on_cpu([one.group for work in works for one in work.configurations]):
        return [_on_a_cpu(works)]
    lines = [_finding(work) for work in works[:MOST_HEADLINES]]
    more = len(works) - MOST_HEADLINES
    lines[-1] += f"; {plural(more, 'more workload')}" if more > 0 else ""
    return lines


def _finding(work: Workload) -> str:
    """Say who leads; of a single configuration its speed."""
    if work.ranking.lead is not None:
        return f"{work.title}: {words.headline(work.ranking)[0]}" if work.title else words.headline(work.ranking)[0]
    rate, gpus, share = throughput(work.ranking.best), work.run.machine.gpus, MFU.value(work.ranking.best)
    subject = work.title or model_name(work.run)
    if rate is None or gpus is None:
        return f"{subject}: throughput not known"
    part = f" ({units.percent(share)} of the dense peak)" if share is not None else ""
    return f"{subject} trains at {units.count(rate.value * gpus)} tokens/s on {machine_name(work.run)}{part}"


def _on_a_cpu(works: Sequence[Workload]) -> str:
    """Say what trained under what; no speed, which a CPU does not show."""
    models = list(dict.fromkeys(model_name(work.run) for work in works))
    names = list(dict.fromkeys(one.name for work in works for one in work.configurations if one.group.run.strategy))
    machines = list(dict.fromkeys(machine_name(work.run) for work in works))
    what, how, where = (few(many, MOST_LISTED + (len(many) == MOST_LISTED + 1)) for many in (models, names, machines))
    under = f" under {how}" if how else ""
    one = len(models) == 1
    return f"{what} train{'s' * one}{under} on {where}; a CPU does not show how fast {'it trains' if one else 'they train'}"


# The subtitle: what the runs were.


def subtitle(works: Sequence[Workload]) -> list[str]:
    """Return what ran, and how often: model, machine, strategy, batch, sequence, dtype, engine; then date, runs and n."""
    groups = [one.group for work in works for one in work.configurations]
    runs = [group.run for group in groups]
    if not runs:
        return []
    what = [
        _values(runs, _full_model, "models"),
        _values(runs, lambda run: machine_name(run) + on_nodes(run), "machines"),
        _values(runs, _strategy_and_layout, "strategies"),
        _values(runs, _batch, "batches", "batch "),
        _values(
            runs,
            lambda run: "" if run.ran.sequence_tokens is None else units.count(run.ran.sequence_tokens),
            "sequences",
            "sequence ",
        ),
        _values(runs, lambda run: dtype_that_ran(run) or "dtype not recorded", "dtypes"),
        _values(runs, engine_name, "engines"),
    ]
    judged = [verdict for work in works for verdict in work.ranking.against_best if verdict is not None]
    return [" · ".join(filter(None, what)), " · ".join(filter(None, _amount(groups))), *words.differing_traits(judged)]


def _full_model(run: RunRecord) -> str:
    if run.ran.shape is None or run.ran.shape.name is None:
        return model_name(run)
    return run.ran.shape.name if run.size == "full" or run.size in run.ran.shape.name else f"{run.ran.shape.name} {run.size}"


def _strategy_and_layout(run: RunRecord) -> str:
    return " ".join(filter(None, (run.strategy, layout(run))))


def _batch(run: RunRecord) -> str:
    if run.ran.global_batch_sequences is None:
        return ""
    micro = "" if run.ran.micro_batch_sequences is None else f" (micro {run.ran.micro_batch_sequences})"
    return f"{run.ran.global_batch_sequences}{micro}"


def _values(runs: Sequence[RunRecord], value: Callable[[RunRecord], str], several: str, before: str = "") -> str:
    values = list(dict.fromkeys(filter(None, map(value, runs))))
    if len(values) > MOST_LISTED:
        return f"{len(values)} {several}"
    return before + ", ".join(values) if values else ""


def _amount(groups: Sequence[Group]) -> list[str]:
    measured = [item for group in groups for item in group.runs]
    days = sorted({item.result.run.started_at[:10] for item in measured if item.result.run.started_at})
    per_group = sorted({len(group.runs) for group in groups})
    runs = plural(len(measured), "run")
    if len(groups) > 1:
        each = (
            "one each"
            if per_group == [1]
            else f"{per_group[0]} each"
            if len(per_group) == 1
            else f"{per_group[0]} to {per_group[-1]} each"
        )
        runs = f"{plural(len(groups), 'configuration')}, {runs}, {each}"
    steps = sum(item.metrics.window.steps for item in measured if item.metrics)
    spread = "95 % intervals over steps" if per_group[-1] == 1 else "95 % intervals over runs where there are several"
    if any(is_vague(rate) for group in groups if (rate := TOKENS.of_group(group)) is not None):
        spread += "; a bar without a line has too few steps or runs for one"
    return [" to ".join(dict.fromkeys((days[0], days[-1]))) if days else "", runs, f"n = {plural(steps, 'steady step')}", spread]
