"""Where a step's time goes, from the dense peak to what was measured: parts that add up to the step exactly.

Each part says how it is known. What nothing measures or predicts is "rest", with parts below LEAST of the step, and never spread
over the others; it is negative where the parts together are longer than the step. Parts are seconds of a mean step on one GPU; in
FLOP/s each takes its share of what the step loses to the peak, so the order of parts does not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from tprimat.analyze.metrics import during
from tprimat.analyze.trace import ProfileSummary
from tprimat.core import units
from tprimat.core.accelerators import find_accelerator, peak_flops
from tprimat.core.flops import flop_per_token
from tprimat.core.models import ModelShape
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import RunMetrics, RunRecord

Exchange = Literal["tensor", "context", "experts", "pipeline", "replicas"]
Kernels = Literal["products", "attention", "memory"]
Waits = Literal["bubble", "optimizer", "recompute", "uneven", "gaps", "host", "data"]
LossName = Literal["clock", Kernels, Exchange, "exchange", Waits, "rest"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
"""In the order of a waterfall. exchange: communication of a trace that does not say between which ranks."""
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
REPEATED: tuple[LossName, ...] = ("products", "attention", "memory", "tensor", "experts")
"""What recomputation repeats."""
Known = Literal["run", "machine", "predicted", "rest"]
"""Measured in this run; measured on this machine, by probes; predicted; or what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedParts:
    """What a step is predicted to take."""

    parts: Mapping[str, float]
    """Part of a prediction -> seconds, without what is computed again."""
    again: Mapping[str, float] = field(default_factory=dict)
    """Part -> seconds that recomputation adds."""
    known_by: Known
    source: str


LEAST = 5e-4
"""Of a step: what takes less is part of the rest."""


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
    result: RunResult, metrics: RunMetrics, trace: ProfileSummary | None = None, expected: ExpectedParts | None = None
) -> Waterfall:
    """Divide the mean steady step of a run.

    Kernels are timed by the trace where there is one, else by the prediction. The model's own FLOP at the peak, and then at the
    clock that was held, are taken out of products and attention.
    """
    step, flops, run = metrics.mean_step_seconds, metrics.model_flops_per_second_per_gpu, result.run
    peak = peak_flops(run.machine.accelerator, run.ran.matmul_dtype) if metrics.peak_dense_flops else None
    at_peak = step * flops.value / peak if peak and flops and flops.value < peak else 0.0
    clock, slower = _clock(result, metrics)
    losses = [Loss(name="clock", seconds=at_peak * slower, known_by="run", source=clock)]
    losses += _parts(result.run, metrics, trace, expected, at_peak * (1 + slower))
    losses = [loss for loss in losses if abs(loss.seconds) > LEAST * step]
    rest = step - at_peak - sum(loss.seconds for loss in losses)
    losses.append(Loss(name="rest", seconds=rest, known_by="rest", source="the step less all other parts"))
    return Waterfall(
        step_seconds=step,
        at_peak_seconds=at_peak,
        losses=tuple(sorted(losses, key=lambda loss: LOSSES.index(loss.name))),
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


def _parts(
    run: RunRecord, metrics: RunMetrics, trace: ProfileSummary | None, expected: ExpectedParts | None, arithmetic: float
) -> list[Loss]:
    """Return all other parts; `arithmetic`: seconds of the model's own FLOP."""
    guess, again = (expected.parts, expected.again) if expected else ({}, {})
    kernels = {} if trace is None else _kernels(run, trace)
    seconds: dict[LossName, float] = {name: guess.get(name, 0.0) for name in LOSSES}
    seconds |= {name: value - again.get(name, 0.0) for name, value in kernels.items()}
    seconds["recompute"] = sum(again.values())
    behind, load = _behind(run, trace), guess.get("uneven", 0.0)
    if trace is not None:  # its collectives wait for other ranks
        seconds["bubble"] = min(seconds["bubble"], seconds["pipeline"])
        behind, load = min(behind, seconds["replicas"]), min(load, seconds["experts"])
        for name, waits in (("pipeline", seconds["bubble"]), ("replicas", behind), ("experts", load)):
            seconds[name] -= waits  # type: ignore[index]
    seconds["uneven"] = behind + load
    for name, value in _ideal(run.ran.shape, run.ran.sequence_tokens, arithmetic).items():
        seconds[name] -= value
        if not kernels:  # what is predicted is no faster than the peak
            seconds[name] = max(0.0, seconds[name])
    sources = dict.fromkeys(kernels, "trace")
    known = [
        *([_slowest(run.rank_seconds)] if len(run.rank_seconds) > 1 else []),
        *(["load of experts"] if metrics.rank_load else []),
    ]
    if known:
        sources["uneven"] = ", ".join(known)
    if trace is not None:
        idle = min(trace.idle_seconds, max(0.0, metrics.mean_step_seconds - trace.step_seconds + trace.idle_seconds))
        seconds["data"] = min(idle, trace.data_seconds)
        seconds["gaps"] = min(idle - seconds["data"], trace.between_seconds)
        seconds["host"] = idle - seconds["data"] - seconds["gaps"]
        sources |= {"gaps": "trace", "host": "trace", "data": "trace"}
    elif metrics.gpu_busy is not None:
        seconds["host"] = (1 - metrics.gpu_busy) * metrics.mean_step_seconds
        sources["host"] = "telemetry: share of time without a kernel"
    else:  # a GPU waits no longer than the step leaves
        kept = metrics.mean_step_seconds - arithmetic - sum(seconds.values()) + seconds["host"]
        seconds["host"] = min(seconds["host"], max(0.0, kept))
    guessed, source = (expected.known_by, expected.source) if expected else ("predicted", "")
    return [
        Loss(name=name, seconds=value, known_by="run" if name in sources else guessed, source=sources.get(name, source))
        for name, value in seconds.items()
    ]


def _kernels(run: RunRecord, trace: ProfileSummary) -> dict[LossName, float]:
    """Return what the kernels of a trace take; communication between unknown ranks is of the only kind that the run has."""
    own = {one.kind: one.seconds for one in trace.classes}
    seconds: dict[LossName, float] = {name: trace.exchanges.get(name, 0.0) for name in EXCHANGES}
    ran, unsaid = run.ran, trace.exposed_communication_seconds - sum(seconds.values())
    degrees = (ran.tensor_parallel, ran.context_parallel, ran.expert_parallel, ran.pipeline_parallel, ran.data_parallel)
    kinds = [name for name, degree in zip(EXCHANGES, degrees, strict=True) if (degree or 1) > 1]
    name: LossName = kinds[0] if len(kinds) == 1 else "exchange"
    seconds[name] = seconds.get(name, 0.0) + unsaid
    seconds["products"] = own.get("matmul", 0.0) + own.get("expert_matmul", 0.0)
    seconds |= {"attention": own.get("attention", 0.0), "optimizer": own.get("optimizer", 0.0)}
    return seconds | {"memory": trace.step_seconds - trace.idle_seconds - sum(seconds.values())}


def _ideal(shape: ModelShape | None, tokens: int | None, seconds: float) -> dict[LossName, float]:
    """Divide the time of the model's FLOP into that of attention's products and that of all others."""
    if shape is None or tokens is None:
        return {"products": seconds}
    once, twice = flop_per_token(shape, tokens), flop_per_token(shape, 2 * tokens)
    return {"attention": seconds * (twice / once - 1), "products": seconds * (2 - twice / once)}


def _slowest(times: tuple[float, ...]) -> str:
    """Name the slowest of the ranks, by what each takes alone."""
    *others, slowest = sorted(times)
    own, usual = units.seconds(slowest), units.seconds(float(np.median(others)))
    return "times of the ranks" + (f": rank {times.index(slowest)} takes {own}, the others {usual}" if own != usual else "")


def _behind(run: RunRecord, trace: ProfileSummary | None) -> float:
    """Return how much longer the slowest rank takes than the rank of the trace, else than the others of its stage."""
    times, stages, behind = run.rank_seconds, run.ran.pipeline_parallel or 1, 0.0
    if run.machine.platform == "cpu" or not times or len(times) % stages:  # processes on a CPU take turns on its cores
        return 0.0
    if trace is not None:
        return max(times) - times[int(trace.origin.get("rank", 0))]
    for first in range(0, len(times), len(times) // stages):
        *others, slowest = sorted(times[first : first + len(times) // stages])
        behind = max(behind, slowest - float(np.median(others))) if others else behind
    return behind
