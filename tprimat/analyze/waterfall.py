"""Where a step's time goes, from the dense peak to what was measured: parts that add up to the step exactly.

Each part says how it is known. What nothing measures or predicts is "rest", and never spread over the others; it is negative
where the parts together are longer than the step. Parts are seconds of a mean step on one GPU; in FLOP/s each takes its share of
what the step loses to the peak, so that no order of parts matters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from tprimat.analyze.metrics import during
from tprimat.analyze.trace import ProfileSummary
from tprimat.core.accelerators import find_accelerator
from tprimat.core.flops import flop_per_token, moe_matrices, parameters
from tprimat.core.models import ModelShape
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import RunMetrics, RunRecord

LossName = Literal[
    "clock",
    "products",
    "attention",
    "memory",
    "tensor",
    "context",
    "experts",
    "pipeline",
    "replicas",
    "exchange",
    "bubble",
    "optimizer",
    "recompute",
    "uneven",
    "host",
    "data",
    "rest",
]
LOSSES: tuple[LossName, ...] = get_args(LossName)
"""In the order of a waterfall. exchange: communication of a trace that does not say between which ranks."""
EXCHANGES: tuple[LossName, ...] = ("tensor", "context", "experts", "pipeline", "replicas")
REPEATED: tuple[LossName, ...] = ("products", "attention", "memory", "tensor", "experts")
"""What recomputation repeats."""
Known = Literal["run", "machine", "predicted", "rest"]
"""Measured in this run; measured on this machine, by probes; predicted; or what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a step is predicted to take."""

    parts: Mapping[str, float]
    """Part of a prediction -> seconds, without what is computed again."""
    again: Mapping[str, float] = field(default_factory=dict)
    """Part -> seconds that recomputation adds."""
    known_by: Known
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One part of a step."""

    name: LossName
    seconds: float
    known_by: Known
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """A step, part by part."""

    step_seconds: float
    at_peak_seconds: float
    """What the model's arithmetic takes at the dense peak of the dtype; 0 where no peak is known."""
    losses: tuple[Loss, ...]
    """Together with `at_peak_seconds` the step; without those that the step does not have."""
    peak_flops: float | None
    """FLOP/s of one GPU."""
    flops: float | None
    """Measured, of one GPU."""

    def flops_of(self, loss: Loss) -> float | None:
        """Return the FLOP/s that a part costs: its share of what lies between peak and measurement."""
        if self.peak_flops is None or self.flops is None:
            return None
        return (self.peak_flops - self.flops) * loss.seconds / (self.step_seconds - self.at_peak_seconds)


def waterfall(
    result: RunResult, metrics: RunMetrics, trace: ProfileSummary | None = None, expected: Expected | None = None
) -> Waterfall:
    """Divide the mean steady step of a run.

    Kernels are timed by the trace where there is one, else by the prediction. The model's own FLOP at the peak, and then at the
    clock that was held, are taken out of products and attention; what is computed again is taken out by prediction.
    """
    run, step = result.run, metrics.mean_step_seconds
    peak, flops = metrics.peak_dense_flops, metrics.model_flops_per_second_per_gpu
    at_peak = step * flops.value / peak if peak and flops else 0.0
    clock, slower = _clock(result, metrics)
    ideal = _ideal(run.ran.shape, run.ran.sequence_tokens, at_peak * (1 + slower))
    losses = [Loss(name="clock", seconds=at_peak * slower, known_by="run", source=clock)]
    if trace is not None:
        losses += _traced(run, metrics, trace, expected, ideal)
    elif expected is not None:
        losses += _expected(run, metrics, expected, ideal)
    else:
        losses += [_ranks(run), *_idle(metrics, None)]
    found = [loss for loss in losses if loss.seconds]
    rest = step - at_peak - sum(loss.seconds for loss in found)
    found.append(Loss(name="rest", seconds=rest, known_by="rest", source="the step less all other parts"))
    return Waterfall(
        step_seconds=step,
        at_peak_seconds=at_peak,
        losses=tuple(sorted(found, key=lambda loss: LOSSES.index(loss.name))),
        peak_flops=peak if at_peak else None,
        flops=flops.value if flops else None,
    )


def _clock(result: RunResult, metrics: RunMetrics) -> tuple[str, float]:
    """Return where the clock is from, and how much longer the same arithmetic takes than at the clock of the peak."""
    accelerator, window = find_accelerator(result.run.machine.accelerator), metrics.window
    steady = [step for step in result.steps if window.first_step <= step.step <= window.last_step]
    clocks = [sample.clock_hertz for sample in during(result.telemetry, steady) if sample.clock_hertz]
    if not clocks or accelerator is None or accelerator.boost_clock_hertz is None:
        return "", 0.0
    mean, boost = float(np.mean(clocks)), accelerator.boost_clock_hertz
    held = ", ".join(f"{reason} in {share * 100:.0f} %" for reason, share in (metrics.held_back or {}).items())
    words = f"telemetry: {mean / 1e6:,.0f} MHz of {boost / 1e6:,.0f}{f'; {held} of the readings' if held else ''}"
    return words, max(0.0, boost / mean - 1)


def _ideal(shape: ModelShape | None, tokens: int | None, seconds: float) -> dict[str, float]:
    """Divide the time of the model's FLOP into that of attention's products and that of all others."""
    if shape is None or tokens is None:
        return {"products": seconds}
    once, twice = flop_per_token(shape, tokens), flop_per_token(shape, 2 * tokens)
    return {"attention": seconds * (twice / once - 1), "products": seconds * (2 - twice / once)}


def _traced(
    run: RunRecord, metrics: RunMetrics, trace: ProfileSummary, expected: Expected | None, ideal: Mapping[str, float]
) -> list[Loss]:
    """Return the parts by the kernels of a trace; a step without the profiler waits no longer than its kernels leave room."""
    step, source = metrics.mean_step_seconds, f"trace of {len(trace.steps)} step{'s' * (len(trace.steps) != 1)}"
    own = {one.kind: one.seconds for one in trace.classes}
    seconds: dict[LossName, float] = {
        "products": own.get("matmul", 0.0) + own.get("expert_matmul", 0.0),
        "attention": own.get("attention", 0.0),
        "optimizer": own.get("optimizer", 0.0),
        **_exchanges(run, trace),
    }
    busy = trace.step_seconds - trace.idle_seconds
    seconds["memory"] = busy - sum(seconds.values())
    again = {part: expected.again.get(part, 0.0) for part in REPEATED} if expected else {}
    taken: dict[LossName, float] = {"bubble": 0.0, "uneven": 0.0}
    if expected:
        taken["bubble"] = min(seconds.get("pipeline", 0.0), expected.parts.get("bubble", 0.0))
    rank = trace.origin.get("rank", 0)
    if run.rank_seconds and isinstance(rank, int) and rank < len(run.rank_seconds):
        waits = max(run.rank_seconds) - run.rank_seconds[rank]
        taken["uneven"] = min(max(0.0, waits), seconds.get("replicas", 0.0))
    seconds["pipeline"] = seconds.get("pipeline", 0.0) - taken["bubble"]
    seconds["replicas"] = seconds.get("replicas", 0.0) - taken["uneven"]
    load = min(_load(run, metrics, own.get("expert_matmul", 0.0)), seconds.get("experts", 0.0))
    seconds["experts"] = seconds.get("experts", 0.0) - load
    losses = [
        Loss(name=name, seconds=value - ideal.get(name, 0.0) - again.get(name, 0.0), known_by="run", source=source)
        for name, value in seconds.items()
    ]
    if expected:
        losses.append(_of(expected, "recompute", sum(again.values())))
        losses.append(_of(expected, "bubble", taken["bubble"]))
    losses.append(
        Loss(name="uneven", seconds=taken["uneven"] + load, known_by="run", source="times of the ranks, load of experts")
    )
    idle = min(trace.idle_seconds, max(0.0, step - busy))
    data = min(idle, trace.data_seconds)
    return [
        *losses,
        Loss(name="host", seconds=idle - data, known_by="run", source=source),
        Loss(name="data", seconds=data, known_by="run", source=source),
    ]


def _exchanges(run: RunRecord, trace: ProfileSummary) -> dict[LossName, float]:
    """Return exposed communication by the ranks that it joins; what does not say it belongs to the only kind that the run has."""
    seconds: dict[LossName, float] = {name: trace.exchanges.get(name, 0.0) for name in EXCHANGES}
    open_ = trace.exposed_communication_seconds - sum(seconds.values())
    ran = run.ran
    degrees = (ran.tensor_parallel, ran.context_parallel, ran.expert_parallel, ran.pipeline_parallel, ran.data_parallel)
    kinds = [name for name, degree in zip(EXCHANGES, degrees, strict=True) if (degree or 1) > 1]
    name: LossName = kinds[0] if len(kinds) == 1 else "exchange"
    return seconds | {name: seconds.get(name, 0.0) + open_}


def _expected(run: RunRecord, metrics: RunMetrics, expected: Expected, ideal: Mapping[str, float]) -> list[Loss]:
    parts = expected.parts
    names: tuple[LossName, ...] = ("attention", "memory", *EXCHANGES, "bubble", "optimizer")
    losses = [_of(expected, name, parts.get(name, 0.0) - ideal.get(name, 0.0)) for name in names]
    losses.append(_of(expected, "products", max(0.0, parts.get("products", 0.0) - ideal["products"])))
    losses.append(_of(expected, "recompute", sum(expected.again.values())))
    load = _load(run, metrics, parts.get("products", 0.0) * _share_of_experts(run.ran.shape))
    uneven = _ranks(run)
    if load > uneven.seconds:
        uneven = Loss(name="uneven", seconds=load, known_by="run", source="load of the busiest rank")
    return [*losses, uneven, *_idle(metrics, expected)]


def _of(expected: Expected, name: LossName, seconds: float) -> Loss:
    return Loss(name=name, seconds=seconds, known_by=expected.known_by, source=expected.source)


def _load(run: RunRecord, metrics: RunMetrics, seconds: float) -> float:
    """Return what the busiest rank takes longer than an even one, of work of experts that takes an even rank so long."""
    return seconds * max(0.0, (metrics.rank_load or 1.0) - 1) if (run.ran.expert_parallel or 1) > 1 else 0.0


def _share_of_experts(shape: ModelShape | None) -> float:
    if shape is None:
        return 0.0
    chosen = sum(matrix.active_parameters for matrix in moe_matrices(shape) if matrix.copies > 1)
    return shape.moe_layers * chosen / parameters(shape).matmul


def _ranks(run: RunRecord) -> Loss:
    """Return how much longer the slowest rank takes for its own part than the median of the others of its pipeline stage."""
    times, stages = run.rank_seconds, run.ran.pipeline_parallel or 1
    behind = 0.0
    if run.machine.platform != "cpu" and len(times) % stages == 0:  # processes on a CPU take turns on its cores
        size = len(times) // stages
        for first in range(0, len(times), size or 1):
            *others, slowest = sorted(times[first : first + size])
            behind = max(behind, slowest - float(np.median(others))) if others else behind
    return Loss(name="uneven", seconds=behind, known_by="run", source="times of the ranks")


def _idle(metrics: RunMetrics, expected: Expected | None) -> list[Loss]:
    if metrics.gpu_busy is not None:
        idle = (1 - metrics.gpu_busy) * metrics.mean_step_seconds
        return [Loss(name="host", seconds=idle, known_by="run", source="telemetry: share of time without a kernel")]
    return [_of(expected, "host", expected.parts.get("host", 0.0))] if expected else []
