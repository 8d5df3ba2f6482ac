"""Groups of repeated runs: what belongs together, how to label a group, and its numbers over all runs."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from tprimat.analyze.metrics import MetricOptions, run_metrics, scaled
from tprimat.errors import MetricError
from tprimat.facts.accelerators import find_accelerator
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import Estimate, RunMetrics, RunRecord
from tprimat.statistics import mean_of_runs

Trait = Callable[[RunRecord], object]
Origin = Callable[[RunResult], str]
Kind = tuple[object, ...]

NO_PRICES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run with its metrics, and the reason if it does not count."""

    result: RunResult
    metrics: RunMetrics | None
    not_counted: str | None = None


def price_of(run: RunRecord, prices: Mapping[str, float]) -> float | None:
    """Return the price of one GPU hour of the run's accelerator, or None.

    Args:
        run: any run.
        prices: by accelerator, under its short name (H200) or any device name (NVIDIA H200 141GB HBM3e).
    """
    known = find_accelerator(run.machine.accelerator)
    for name, price in prices.items():
        if name == run.machine.accelerator or (known is not None and find_accelerator(name) is known):
            return price
    return None


def measure(result: RunResult, options: MetricOptions, prices: Mapping[str, float] = NO_PRICES) -> Measured:
    """Compute the metrics of one run. A run that must not count keeps them where they can be computed, with the reason."""
    run = result.run
    reason = None
    if run.outcome == "running":
        reason = f"no end was recorded: it still runs, or was killed with its launcher; steps so far: {len(result.steps)}"
    elif run.outcome != "completed":
        reason = f"{run.outcome}" + (f": {run.cause}" if run.cause else "")
    elif run.mismatches:
        reason = "what ran is not what was asked: " + "; ".join(run.mismatches)
    price = options.cost_per_gpu_hour if options.cost_per_gpu_hour is not None else price_of(run, prices)
    stated = result.stated_tokens_per_second
    chosen = replace(options, telemetry=result.telemetry, cost_per_gpu_hour=price, stated_tokens_per_second=stated)
    try:
        metrics = run_metrics(run, result.steps, options=chosen)
    except MetricError as error:
        return Measured(result=result, metrics=None, not_counted=reason or error.what)
    return Measured(result=result, metrics=metrics, not_counted=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Repeated runs of one configuration on one kind of machine. Every run in it counts."""

    label: str
    kind: Kind
    """Origin, the value of each of TRAITS, and the file of a run that does not record what it is."""
    runs: tuple[Measured, ...]

    @property
    def run(self) -> RunRecord:
        """The record of the first run; the others differ in time, seed and measurements only."""
        return self.runs[0].result.run


def tokens_per_step(run: RunRecord) -> int | None:
    """Return the tokens of a step: observed where there is evidence, else batch times sequence length."""
    if run.evidence is not None and run.evidence.tokens_per_step is not None:
        return run.evidence.tokens_per_step
    if run.global_batch_sequences is None or run.sequence_tokens is None:
        return None
    return run.global_batch_sequences * run.sequence_tokens


def accelerator_name(run: RunRecord) -> str:
    """Return our short name where the accelerator is known, else the name that the machine reported."""
    known = find_accelerator(run.machine.accelerator)
    return known.name if known else run.machine.accelerator or "unknown accelerator"


def layout(run: RunRecord) -> str:
    """Return the layout, such as TP4 PP2 DP1: without what is not recorded, and with VPP, CP and EP only where they are not 1."""
    rare = (("VPP", run.virtual_pipeline), ("CP", run.context_parallel), ("EP", run.expert_parallel))
    sizes = [("TP", run.tensor_parallel), ("PP", run.pipeline_parallel)]
    sizes += [(name, size) for name, size in rare if size != 1]
    return " ".join(f"{name}{size}" for name, size in (*sizes, ("DP", run.data_parallel)) if size is not None)


def ranks(run: RunRecord) -> str | None:
    """Return '8 GPUs', '1 GPU', or '8 processes' on a CPU; None where the number is not recorded."""
    count = run.machine.gpus
    nouns = ("process", "processes") if run.machine.platform == "cpu" else ("GPU", "GPUs")
    return f"{count:,} {nouns[count != 1]}" if count else None


def machine_name(run: RunRecord) -> str:
    """Return '8 x H100 SXM', or '8 processes (AMD EPYC)', since processes share one CPU."""
    name = accelerator_name(run)
    return f"{ranks(run)} ({name})" if run.machine.platform == "cpu" else f"{run.machine.gpus or 'unknown'} x {name}"


def engine_words(run: RunRecord) -> str:
    """Return the engine, and Transformer Engine where the running model was seen to have its layers."""
    seen = run.evidence is not None and run.evidence.transformer_engine
    return f"{run.engine} with Transformer Engine" if seen else run.engine


def _seen(run: RunRecord, name: str, before: str = "") -> str:
    """Return a field of the evidence in words; empty where it is not known."""
    value = None if run.evidence is None else getattr(run.evidence, name)
    return "" if value is None else f"{before}{value}"


TRAITS: Mapping[str, Trait] = {
    "model": lambda run: run.model if run.size == "full" else f"{run.model} {run.size}",
    "accelerator": accelerator_name,
    "GPUs": lambda run: ranks(run) or "GPUs unknown",
    "nodes": lambda run: "" if run.machine.nodes in {None, 1} else f"{run.machine.nodes} nodes",
    "strategy": lambda run: run.strategy or "strategy unknown",
    "layout": layout,
    "engine": engine_words,
    "dtype": lambda run: run.matmul_dtype or "dtype unknown",
    "batch": lambda run: f"GBS {run.global_batch_sequences} MBS {run.micro_batch_sequences}",
    "tokens": lambda run: f"{tokens_per_step(run) or 'unknown'} tokens a step",
    "sequence": lambda run: f"s{run.sequence_tokens}",
    "recompute": lambda run: f"recompute {run.recompute}",
    "clock": lambda run: f"clock {run.clock}",
    "options": lambda run: (
        ", ".join(f"{name}={value}" for name, value in sorted(run.engine_options.items())) or "default options"
    ),
    "shape": lambda run: "shape unknown" if run.shape is None else f"{run.shape.layers} layers of {run.shape.hidden}",
    "attention": lambda run: _seen(run, "attention"),
    "optimizer": lambda run: _seen(run, "optimizer"),
    "gradients": lambda run: _seen(run, "gradient_dtype", "gradients in "),
    "data": lambda run: re.sub(r" \(seed \d+\)", "", _seen(run, "data", "data ")),
    "power limit": lambda run: "" if run.machine.power_limit_watts is None else f"{run.machine.power_limit_watts:.0f} W",
    "driver": lambda run: "" if run.machine.driver is None else f"driver {run.machine.driver}",
    "software": lambda run: (
        ", ".join(f"{name} {version}" for name, version in sorted(run.software.items())) or "software unknown"
    ),
}
"""What distinguishes configurations, in the order in which a label names it."""
LISTS = ("options", "software")
"""Traits of many words each, of which a label names only those that distinguish runs."""


def differing_traits(first: Group, second: Group) -> dict[str, tuple[str, str]]:
    """Return each trait in which two groups differ, with its words on both sides; of a list only the parts that differ."""
    found = {}
    for name, trait in TRAITS.items():
        one, other = str(trait(first.run)), str(trait(second.run))
        if one == other:
            continue
        if name in LISTS:
            parts = one.split(", "), other.split(", ")
            one, other = (", ".join(part for part in mine if part not in theirs) for mine, theirs in (parts, parts[::-1]))
        found[name] = (one or "not recorded", other or "not recorded")
    return found


def group_runs(measured: Sequence[Measured], origin: Origin | None = None) -> list[Group]:
    """Group the runs that count by configuration, in order of first appearance.

    Args:
        measured: runs of any kind.
        origin: names where a run comes from. Runs of different origins then belong to different groups, and labels begin with
            the name. Without it a configuration is one group wherever its files are.
    """
    kinds: dict[Kind, list[Measured]] = {}
    for item in measured:
        if item.not_counted is None and item.metrics is not None:
            kinds.setdefault(kind_of(item.result, origin), []).append(item)
    labels = _labels(list(kinds), 0 if origin is None else 1)
    return [Group(label=label, kind=kind, runs=tuple(runs)) for label, (kind, runs) in zip(labels, kinds.items(), strict=True)]


def kind_of(result: RunResult, origin: Origin | None) -> Kind:
    """Return what repeated runs share: origin, traits, and the file of a run that records too little to be a repetition."""
    run = result.run
    anonymous = not (run.strategy or layout(run) or run.matmul_dtype or run.engine_options)
    file = f"{result.path.parent.name}/{result.path.stem}" if anonymous else ""
    return ("" if origin is None else f"{origin(result)}:", *(trait(run) for trait in TRAITS.values()), file)


def _labels(kinds: Sequence[Kind], prefixes: int) -> list[str]:
    """Label each kind by model and accelerator, adding a further trait only where it distinguishes two groups."""
    names = ["origin", *TRAITS, "file"]
    shown = [*range(prefixes), names.index("model"), names.index("accelerator")]
    for index in range(1, len(names)):
        seen = [tuple(kind[i] for i in shown) for kind in kinds]
        times = Counter(seen)
        if len(times) == len(kinds):
            break
        if index not in shown and len({(short, kind[index]) for short, kind in zip(seen, kinds, strict=True)}) > len(times):
            shown.append(index)
    lists = {names.index(name) for name in LISTS}
    others = [tuple(kind[i] for i in shown if i not in lists) for kind in kinds]
    words = {i: [str(kind[i]) for kind in kinds] for i in shown}
    words |= {i: _distinctive_parts(words[i], others) for i in lists & words.keys()}
    return [" ".join(filter(None, (words[i][place] for i in sorted(shown)))) for place in range(len(kinds))]


def _distinctive_parts(lists: Sequence[str], others: Sequence[Kind]) -> list[str]:
    """Return of each comma-separated list what differs from the majority of lists with the same other words.

    Args:
        lists: such as 'fused_adam=True, load_ahead=True'.
        others: the other words of each label.
    """
    parts = [text.split(", ") for text in lists]
    sizes = Counter(others)
    seen = Counter((other, part) for mine, other in zip(parts, others, strict=True) for part in mine)
    usual: dict[Kind, list[str]] = {other: [] for other in sizes}
    for (other, part), times in seen.items():
        if 2 * times > sizes[other]:
            usual[other].append(part)
    return [_differences_from_usual(mine, usual[other]) for mine, other in zip(parts, others, strict=True)]


def _differences_from_usual(mine: Sequence[str], usual: Sequence[str]) -> str:
    names = {_name_of_part(part) for part in mine}
    missing = [f"without {_name_of_part(part)}" for part in usual if _name_of_part(part) not in names]
    return ", ".join([*(part for part in mine if part not in usual), *missing])


def _name_of_part(part: str) -> str:
    """Return the name in 'load_ahead=True' or 'torch 2.11.0'."""
    return part.replace("=", " ").split(" ")[0]


def group_estimate(group: Group, pick: Callable[[RunMetrics], Estimate | None]) -> Estimate | None:
    """Return a number of a group: the estimate of a single run, or the mean of several with the spread between runs."""
    estimates = [pick(item.metrics) for item in group.runs if item.metrics is not None]
    present = [estimate for estimate in estimates if estimate is not None]
    if not present or len(present) < len(estimates):
        return None
    if len(present) == 1:
        return present[0]
    return scaled(mean_of_runs(np.array([estimate.value for estimate in present])), 1.0, len(present))


def group_mean(group: Group, pick: Callable[[RunMetrics], float | None]) -> float | None:
    """Return the mean of a plain number over the runs of a group; None where a run does not have it."""
    values = [pick(item.metrics) for item in group.runs if item.metrics is not None]
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None


def group_worst(group: Group, pick: Callable[[RunMetrics], float | None]) -> float | None:
    """Return the largest value of a number over the runs of a group; None where no run has it."""
    return max((value for item in group.runs if item.metrics is not None and (value := pick(item.metrics))), default=None)


def spread_between_runs(group: Group) -> float | None:
    """Return the relative standard deviation of throughput between runs; None for one run, or where a run has none."""
    rates = [item.metrics.tokens_per_second_per_gpu if item.metrics else None for item in group.runs]
    values = [rate.value for rate in rates if rate is not None]
    return float(np.log(values).std(ddof=1)) if len(values) == len(rates) > 1 else None
