"""Explain a run against another run, or a published row: what differs, what that is worth, and what is left."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tprimat.analyze.groups import group_runs
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.published import nearest_published
from tprimat.analyze.waterfall import LOSSES
from tprimat.core import units
from tprimat.core.accelerators import find_accelerator
from tprimat.core.errors import ConfigError
from tprimat.core.flops import flop_per_token
from tprimat.core.implementations import FSDP, MEGATRON_FSDP, MEGATRON_TUNED
from tprimat.core.published import PublishedResult, facts_of, rebase, results
from tprimat.core.rows import DATA, document
from tprimat.core.workload import PRECISIONS, FullWorkload, Workload
from tprimat.predict.calibration import Expected, expected
from tprimat.predict.rates import Rates, published_rates
from tprimat.predict.time import predict_time
from tprimat.records.schema import ProbeRecord
from tprimat.report.explain import Against, Apart, Explanation, named
from tprimat.report.plan import layout_name
from tprimat.report.words import without_mfu
from tprimat.runner.analysis import read_results
from tprimat.runner.explain import explained, newest, trace_of_run

FIELDS: dict[str, list[str]] = document(DATA / "traits.yaml")["differences"]
MEASURED = ("gaps", "host", "data")
"""Parts that no prediction of a field contains: sustained rates contain the clock."""
VERSIONS = ("tprimat", "torch", "megatron-core", "transformer-engine", "nemo-toolkit", "nccl")
"""Of software, whose effect no prediction knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A run, or a published row."""

    name: str
    flops: float
    """Of one GPU, causal; 0: not measured."""
    known: Workload
    full: FullWorkload | None
    rates: Rates | None
    explanation: Explanation | None = None


def against(explanation: Explanation, other: str, probes: Sequence[ProbeRecord]) -> Against:
    """Return how a run differs from another: a path of results, the id of a published row, or `published` for the nearest row."""
    return compared(_side(explanation), _other(explanation, other, probes))


def compared(here: Side, there: Side) -> Against:
    """Return how two sides differ; a side that was not measured is as fast as the other and all differences let expect."""
    if there.explanation is not None:
        here, there = _on_device(here), _on_device(there)
    apart = [*_worths(here, there), *_of_machines(here, there)]
    usual = there.flops + sum(one.flops or 0.0 for one in apart)
    parts: dict[str, float] = {}
    if there.explanation is not None:
        alike = all(one.flops is None for one in apart)
        names = [name for name in LOSSES if name != "rest"] if alike else MEASURED
        parts = {name: size for name in names if (size := _part(name, here, there))}
    if here.flops:
        parts |= {"rest": here.flops - usual - sum(parts.values())}
    difference = Against(name=there.name, here=here.flops or usual, there=there.flops, apart=tuple(apart), parts=parts)
    if there.explanation or here.full is None or here.rates is None or there.full is None:
        return difference
    step = _usual_step(here.full, here.rates)
    return replace(difference, low=usual * step.step_seconds / step.high, high=usual * step.step_seconds / step.low)


def _on_device(side: Side) -> Side:
    """Return a run without what its prediction says of its host, which is measured."""
    alone = side.full and replace(side.full, implementation=replace(side.full.code, launches_own_layers=False))
    return replace(side, full=alone)


def _usual_step(work: FullWorkload, rates: Rates) -> Expected:
    """Return a step over its prediction: as it usually is, with an interval."""
    accelerator = find_accelerator(rates.accelerator)
    assert accelerator is not None
    return expected(work, accelerator, rates.gpus_per_node, measured=rates.measured)


def _part(name: str, here: Side, there: Side) -> float:
    """Return the FLOP/s that a part contributes to the difference; of two steps of the same work all add up."""
    shares = []
    for side in (here, there):
        parts = side.explanation.parts if side.explanation else None
        shares.append(sum(loss.seconds for loss in parts.losses if loss.name == name) / parts.step_seconds if parts else 0.0)
    return here.flops * shares[1] - there.flops * shares[0]


def _of_machines(here: Side, there: Side) -> Iterator[Apart]:
    """Yield the routing and the power limit, which are worth what experts and clocks are, and versions."""
    if here.known.routing != there.known.routing:
        routes = str(here.known.routing or units.ABSENT), str(there.known.routing or units.ABSENT)
        yield Apart(name="routing", here=routes[0], there=routes[1], flops=_part("uneven", here, there))
    if here.explanation is None or there.explanation is None:
        return
    one, other = (side.explanation.measured.result.run for side in (here, there) if side.explanation)
    limits = one.machine.power_limit_watts, other.machine.power_limit_watts
    if None not in limits and limits[0] != limits[1]:
        yield Apart(name="power limit", here=f"{limits[0]:.0f} W", there=f"{limits[1]:.0f} W", flops=_part("clock", here, there))
    for name in VERSIONS:
        versions = [run.software.get(name, "").split("+source")[0] for run in (one, other)]
        if all(versions) and versions[0] != versions[1]:
            yield Apart(name=name, here=versions[0], there=versions[1], flops=None)


def _side(explanation: Explanation) -> Side:
    run = explanation.measured.result.run
    if explanation.parts.flops is None or run.machine.platform == "cpu":
        why = without_mfu(explanation.measured.metrics) or None
        raise ConfigError("There is no FLOP/s to compare.", where=str(explanation.measured.result.path), why=why)
    name, flops = named(explanation), explanation.parts.flops
    return Side(
        name=name, flops=flops, known=run.ran, full=explanation.workload, rates=explanation.rates, explanation=explanation
    )


def _other(explanation: Explanation, other: str, probes: Sequence[ProbeRecord]) -> Side:
    if other != "published" and Path(other).exists():
        measured = newest(read_results([Path(other)], MetricOptions(), {}).measured, Path(other))
        trace = trace_of_run(measured.result.run, measured.result.path) if explanation.trace else None
        return _side(explained(measured, probes, trace))
    return published_side(_nearest(explanation) if other == "published" else published_named(other))


def _nearest(explanation: Explanation) -> PublishedResult:
    near = [neighbor for one in nearest_published(group_runs([explanation.measured])) for neighbor in one.neighbors]
    for neighbor in near:
        if not {"model", "accelerator", "dtype"} & {difference.name for difference in neighbor.differences}:
            return neighbor.result
    what = "No published row has this model, accelerator and dtype."
    raise ConfigError(what, where="--against published", fix=f"--against {near[0].result.name}" if near else None)


def published_named(name: str) -> PublishedResult:
    """Return a published row by its id."""
    row = next((row for row in results() if row.name == name), None)
    if row is None:
        fix = "a name that python3 -m tprimat models --published lists; explain --against takes a folder of results, too"
        raise ConfigError(f"There is no published row {name!r}.", where=name, fix=fix)
    return row


def published_side(row: PublishedResult) -> Side:
    """Return a published row as a side."""
    flops, full, accelerator = rebase(row).flops_per_second_per_gpu, published_workload(row), find_accelerator(row.accelerator)
    if flops is None:
        raise ConfigError(f"{row.name} states no FLOP/s, and too little to count them.", where=row.name, fix="another row")
    rates = published_rates(accelerator, min(accelerator.node_gpus, row.gpus or accelerator.node_gpus)) if accelerator else None
    return Side(name=row.name, flops=flops, known=row.workload, full=full, rates=rates)


def published_workload(row: PublishedResult) -> FullWorkload | None:
    """Return the workload of a row, with one sequence as micro-batch where it states none; None where it leaves out more."""
    known, facts = row.workload, facts_of(row)
    if facts is None or None in (known.global_batch_sequences, known.sequence_tokens, known.tensor_parallel):
        return None
    if known.matmul_dtype not in PRECISIONS:
        return None
    sharded = MEGATRON_FSDP if row.engine == "megatron-bridge" else FSDP
    code = sharded if known.weights_split_over else MEGATRON_TUNED
    return FullWorkload(**{"micro_batch_sequences": 1, **facts, "implementation": code})


def flops_of(work: FullWorkload, rates: Rates) -> float:
    """Return the FLOP/s of one GPU by prediction."""
    return predict_time(work, rates).tokens_per_second_per_gpu * flop_per_token(work.shape, work.sequence_tokens)


def _worths(here: Side, there: Side) -> Iterator[Apart]:
    """Yield in what two sides differ, by prediction from there to here; beside a row also what predictions usually miss."""
    if here.full is None or here.rates is None or there.full is None or there.rates is None:
        for name, keys in FIELDS.items():
            values = [[getattr(side.known, key, None) for key in keys] for side in (here, there)]
            if None not in (values[0][0], values[1][0]) and values[0] != values[1]:
                yield Apart(name=name, here=_shown(name, here.known), there=_shown(name, there.known), flops=None)
        return
    scale, before, now = there.flops / flops_of(there.full, there.rates), there.full, there.full
    if here.rates.accelerator != there.rates.accelerator:
        worth = scale * (flops_of(now, here.rates) - flops_of(now, there.rates))
        yield Apart(name="accelerator", here=here.rates.accelerator, there=there.rates.accelerator, flops=worth)
    waiting: list[str] = []
    for name, keys in FIELDS.items():
        changed: dict[str, Any] = {key: getattr(here.full, key) for key in keys}
        if all(getattr(now, key) == value for key, value in changed.items()):
            continue
        if name in {"layout", "dtype"} and here.full.code.name == there.full.code.name:  # what it can overlap depends on both
            changed["implementation"] = here.full.code
        now, waiting = replace(now, **changed), [*waiting, name]
        divides = now.shape.layers >= now.layout.chunks
        if divides and now.global_batch_sequences % (now.micro_batch * now.data_parallel) == 0:  # else with the next field
            worth = scale * (flops_of(now, here.rates) - flops_of(before, here.rates))
            words = [", ".join(_shown(one, side) for one in waiting) for side in (here.full, there.full)]
            if words[0] == words[1] and waiting == ["implementation"]:
                words = _differing([one.name for one in fields(now.code)], here.full.code, there.full.code)
            elif words[0] == words[1]:
                words = _differing([key for one in waiting for key in FIELDS[one]], here.full, there.full)
            yield Apart(name=", ".join(waiting), here=words[0], there=words[1], flops=worth)
            before, waiting = now, []
    if there.explanation is None:
        steps = [_usual_step(full, rates).step_seconds for full, rates in ((now, here.rates), (there.full, there.rates))]
        whole = there.flops + scale * (flops_of(now, here.rates) - flops_of(there.full, there.rates))
        words = [f"{units.percent(abs(step - 1))} {'longer' if step > 1 else 'shorter'} than predicted" for step in steps]
        yield Apart(name="such runs usually take", here=words[0], there=words[1], flops=whole * (steps[1] / steps[0] - 1))


def _differing(keys: Sequence[str], here: object, there: object) -> list[str]:
    """Spell out what differs of two sides that have the same name, for each."""
    names = [key for key in keys if getattr(here, key) != getattr(there, key)]
    values = [[getattr(side, name) for name in names] for side in (here, there)]
    shown = [[" ".join(map(str, value)) if isinstance(value, tuple) else value for value in side] for side in values]
    return [", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in zip(names, side, strict=True)) for side in shown]


def _shown(name: str, work: Workload) -> str:
    if name == "layout" and isinstance(work, FullWorkload):
        return layout_name(work)
    if name == "recomputation":
        return work.recompute_words or "none"
    value = getattr(work, FIELDS[name][0])
    return str(getattr(value, "name", value))
