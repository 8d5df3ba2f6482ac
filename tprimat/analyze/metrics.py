"""Derive the metrics of a run from its steps. Everything that prints or draws a rate gets it from `run_metrics`."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

import numpy as np

from tprimat.analyze.window import Warmup, steady_steps, steady_window, tensor_memory
from tprimat.core.accelerators import peak_flops
from tprimat.core.flops import FlopConvention, flop_per_token
from tprimat.core.statistics import Array, Interval, TwoStates, median, median_interval, ratio_of_sums, scaled_mad, two_states
from tprimat.records.benchmark_file import Stated
from tprimat.records.evidence import STEPS_WITHOUT_GRAPHS, captures_layers, cautions
from tprimat.records.schema import Estimate, Finding, RunMetrics, RunPrediction, RunRecord, StepRecord, TelemetrySample, Window

OF_MACHINE = ("thermal", "hot", "brake", "slowdown")
"""Throttle reasons of NVML and AMD SMI that are a state of the machine, which another day may not have."""
LOWERED = "application"
"""Of clocks that somebody set (NVML: application clocks): a state of the machine where all readings show it."""
THROTTLING = (*OF_MACHINE, LOWERED, "power", "cap")
"""Throttle reasons that mean a clock below the usual one. A power cap belongs to the configuration that draws the power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOptions:
    """How metrics are counted. The defaults are what a fair comparison uses."""

    flops_convention: FlopConvention = "causal"
    warmup: Warmup = "auto"
    peak: Literal["dense", "sparse"] = "dense"
    """sparse only to reproduce figures published against the peak with 2:4 sparsity, which no dense training can reach."""
    cost_per_gpu_hour: float | None = None
    """In the user's currency."""
    telemetry: Sequence[TelemetrySample] = ()
    stated: Stated = field(default_factory=Stated)
    """What a file states of telemetry that is not with it; its energy is used where it is of the same steps."""
    gemm_ceiling_flops: float | None = None
    """Best matrix multiplication rate that was measured on this accelerator in this dtype, FLOP/s."""


def run_metrics(run: RunRecord, steps: Sequence[StepRecord], *, options: MetricOptions = MetricOptions()) -> RunMetrics:
    """Derive every number of one run.

    Throughput is sum(tokens) / sum(seconds): a ratio of sums, so a slow step weighs what it costs. Model FLOP count what the
    model needs, not what recomputation repeats; MFU (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) divides them by the
    dense peak of the dtype that ran. Raises MetricError: no steady step.
    """
    without_graphs = STEPS_WITHOUT_GRAPHS if run.engine_options.get("cuda_graphs") is True else 0  # of the embedded engine
    window = steady_window(steps, options.warmup, run.profiled_steps, without_graphs)
    steady = steady_steps(tensor_memory(run, steps), window)
    seconds = np.array([step.step_seconds for step in steady])
    states, dropped = two_states(seconds), _mean(step.dropped for step in steady)
    energy, of_energy = _joules_per_token(options, steady, window, run.machine.gpus)
    clocks = held_back(options.telemetry, steady) if options.telemetry else options.stated.held_back
    return RunMetrics(
        window=window,
        step_seconds=scaled(_unless(states, median_interval(seconds, of_steps=True)), 1.0, window.steps),
        mean_step_seconds=float(seconds.mean()),
        steps_per_second=1 / float(seconds.mean()),
        step_seconds_mad=scaled_mad(seconds),
        **_rates(run, options, steady, states, dropped),
        measured_gemm_flops=options.gemm_ceiling_flops,
        peak_memory_bytes=_largest(step.peak_allocated_bytes for step in steady),
        peak_reserved_bytes=_largest(step.peak_reserved_bytes for step in steady),
        **_errors_of_prediction(None if drops_choices(run, dropped) else run.prediction, steady),
        final_loss=next((step.loss for step in reversed(steps) if step.loss is not None), None),
        joules_per_token=energy,
        expert_load=_mean(step.expert_load for step in steady),
        rank_load=_mean(step.rank_load for step in steady),
        dropped=dropped,
        held_back=None if clocks is None else dict(clocks),
        gpu_busy=gpu_busy(options.telemetry, steady) if options.telemetry else options.stated.gpu_busy,
        warnings=(
            *_of_steps(steady, window, states),
            *_of_run(run),
            *(Finding(kind="clocks", subjects=(reason,), numbers=(share,)) for reason, share in (clocks or {}).items()),
            *of_energy,
        ),
    )


def _rates(
    run: RunRecord, options: MetricOptions, steady: Sequence[StepRecord], states: TwoStates | None, dropped: float | None
) -> dict[str, Any]:
    """Return what is counted by the second, as fields of the metrics: tokens, FLOP, their shares of peaks, and cost."""
    tokens, gpus, hourly = _tokens(steady), run.machine.gpus, options.cost_per_gpu_hour
    seconds = np.array([step.step_seconds for step in steady])
    rate = None if tokens is None else _unless(states, ratio_of_sums(tokens, seconds))
    flop, no_flop = _flop_per_token(run, options.flops_convention, dropped)
    peak, no_peak = _peak(run, options)
    per_gpu = scaled(rate, 1 / gpus, len(steady)) if rate and gpus else None
    flops = scaled(per_gpu, flop, len(steady)) if per_gpu and flop else None
    mfu = scaled(flops, 1 / peak, len(steady)) if flops and peak else None
    no_rate = Finding(kind="no MFU: not recorded", subjects=("number of tokens in a step" if rate is None else "number of GPUs",))
    return {
        "tokens_per_second": rate.value if rate else None,
        "tokens_per_second_per_gpu": per_gpu,
        "flop_per_token": flop,
        "flops_convention": options.flops_convention,
        "model_flops_per_second_per_gpu": flops,
        "peak_dense_flops": peak,
        "mfu": mfu,
        "mfu_absent_because": None if mfu else no_peak or no_flop or no_rate,
        "share_of_measured_gemm": flops.value / options.gemm_ceiling_flops if flops and options.gemm_ceiling_flops else None,
        "cost_per_million_tokens": hourly / (per_gpu.value * 3600) * 1e6 if per_gpu and hourly is not None else None,
    }


def drops_choices(run: RunRecord, dropped: float | None) -> bool:
    """Whether a run computes less than its prediction, which knows of no full expert. `dropped` is the recorded share."""
    return isinstance(run.ran.expert_capacity, float | int) if dropped is None else dropped > 0


def _errors_of_prediction(prediction: RunPrediction | None, steady: Sequence[StepRecord]) -> dict[str, Any]:
    """Compare a prediction: its peak with the allocated one, or with the reserved one where a framework prints no other."""
    allocated = _largest(step.peak_allocated_bytes for step in steady)
    reserved = _largest(step.peak_reserved_bytes for step in steady)
    errors: dict[str, float] = {}
    if prediction is not None and allocated:
        errors["predicted_memory_error"] = prediction.allocated_bytes / allocated - 1
    elif prediction is not None and reserved:
        errors["predicted_memory_error"] = prediction.reserved_bytes / reserved - 1
    if prediction is not None and prediction.step_seconds is not None:
        errors["predicted_step_error"] = prediction.step_seconds / median(np.array([step.step_seconds for step in steady])) - 1
    return errors


def _unless(states: TwoStates | None, interval: Interval) -> Interval:
    """Return an interval without its ends where steps switch between two speeds, which no formula here covers."""
    return interval if states is None else Interval(value=interval.value, low=None, high=None)


def _tokens(steps: Sequence[StepRecord]) -> Array | None:
    """Return the tokens of each step, shape (n,); None where a step lacks them."""
    tokens = [step.tokens for step in steps]
    return None if None in tokens else np.array(tokens, float)


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def scaled(interval: Interval | Estimate, factor: float, samples: int) -> Estimate:
    """Return an interval in other units."""
    low = None if interval.low is None else interval.low * factor
    high = None if interval.high is None else interval.high * factor
    return Estimate(value=interval.value * factor, low=low, high=high, samples=samples)


# FLOP and peak: each a number, or why there is none.


def _flop_per_token(run: RunRecord, convention: FlopConvention, dropped: float | None) -> tuple[float | None, Finding | None]:
    if run.ran.shape is None:
        return None, Finding(kind="no MFU: not recorded", subjects=(f"shape of model {run.model!r}",))
    if run.engine == "torchtune":
        return None, Finding(kind="no MFU: weights of torchtune")
    if run.ran.sequence_tokens is None:
        return None, Finding(kind="no MFU: not recorded", subjects=("sequence length",))
    if dropped is None and drops_choices(run, None):
        return None, Finding(kind="no MFU: dropped choices", subjects=(f"{run.ran.expert_capacity:g}",))
    return flop_per_token(run.ran.shape, run.ran.sequence_tokens, convention, dropped or 0.0), None


def _peak(run: RunRecord, options: MetricOptions) -> tuple[float | None, Finding | None]:
    """Return the peak FLOP/s of one GPU, or why there is none. Never the peak of another GPU."""
    kind, dtype = options.peak, run.ran.matmul_dtype
    if run.machine.platform == "cpu":
        return None, Finding(kind="no MFU: CPU")
    if run.machine.accelerator is None or dtype is None:
        return None, Finding(
            kind="no MFU: not recorded", subjects=("dtype that ran" if run.machine.accelerator else "accelerator",)
        )
    peak = peak_flops(run.machine.accelerator, dtype, sparse=kind == "sparse")
    return peak, None if peak else Finding(kind="no MFU: no peak", subjects=(kind, dtype, run.machine.accelerator))


# Energy.


def _joules_per_token(
    options: MetricOptions, steady: Sequence[StepRecord], window: Window, gpus: int | None
) -> tuple[float | None, list[Finding]]:
    """Return the joules of a token over the steady steps, which must be consecutive; or what is missing."""
    tokens, stated = _tokens(steady), options.stated
    if gpus is None or tokens is None:
        return None, []
    if not options.telemetry and stated.joules_per_token and stated.window:
        one, other = stated.window, window
        both = min(one.last_step, other.last_step) + 1 - max(one.first_step, other.first_step)
        either = max(one.last_step, other.last_step) + 1 - min(one.first_step, other.first_step)
        alike = one.left_out == other.left_out and both >= 0.8 * either > 0  # mostly the same steps
        return (stated.joules_per_token, []) if alike else (None, [Finding(kind="energy of other steps")])
    if window.left_out and options.telemetry:
        return None, [Finding(kind="energy of profiled steps")]
    energy, missing = joules(options.telemetry, steady, gpus)
    return (None if energy is None else energy / float(tokens.sum())), missing


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def joules(samples: Sequence[TelemetrySample], steps: Sequence[StepRecord], gpus: int) -> tuple[float | None, list[Finding]]:
    """Return the energy that all GPUs drew over consecutive steps: power integrated by the trapezoid rule, GPU by GPU.

    Readings of fewer or more GPUs than ran, or with gaps, give no figure but a finding: what is missing is not guessed.
    """
    by_gpu: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        if sample.power_watts is not None:
            by_gpu[sample.gpu].append((sample.at_seconds, sample.power_watts))
    first, last = steps[0].ended_at_seconds, steps[-1].ended_at_seconds
    if not by_gpu:
        return None, []
    if first is None or last is None:
        return None, [Finding(kind="no ends of steps")]
    if len(by_gpu) != gpus:
        return None, [Finding(kind="power of few GPUs", numbers=(len(by_gpu), gpus))]
    start = first - steps[0].step_seconds
    parts = [_integral(sorted(series), start, last) for series in by_gpu.values()]
    known = [part for part in parts if part is not None]
    return (sum(known), []) if len(known) == gpus else (None, [Finding(kind="gaps in power", numbers=(gpus - len(known), gpus))])


def watts_per_gpu(run: RunRecord, metrics: RunMetrics | None) -> float | None:
    """Return the mean power of one GPU over the steady steps: energy of a token x tokens per second / GPUs."""
    gpus = run.machine.gpus
    if metrics is None or metrics.joules_per_token is None or metrics.tokens_per_second is None or not gpus:
        return None
    return metrics.joules_per_token * metrics.tokens_per_second / gpus


def _integral(readings: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """Return joules between two times; None where readings stop or pause for more than two sampling intervals."""
    times, watts = (np.array(column) for column in zip(*readings, strict=True))
    if len(times) < 2:
        return None
    slack = 2 * float(np.median(np.diff(times)))
    inside = times[(times > start) & (times < end)]
    gaps = np.diff(np.concatenate(([max(start, times[0])], inside, [min(end, times[-1])])))
    if times[0] > start + slack or times[-1] < end - slack or gaps.max() > 2.5 * slack:
        return None
    grid = np.concatenate(([start], inside, [end]))
    power = np.interp(grid, times, watts)
    return float((np.diff(grid) * (power[1:] + power[:-1]) / 2).sum())


# What a reader must know about the figures; report/words.py puts it into sentences.


def _of_steps(steady: Sequence[StepRecord], window: Window, states: TwoStates | None) -> list[Finding]:
    findings = []
    if window.steps < 10:  # intervals of fewer are wide
        findings.append(Finding(kind="few steps", numbers=(window.steps,)))
    drift = (window.drift_per_step or 0.0) * window.steps
    if abs(drift) >= 0.005:  # long runs show smaller trends, which are irrelevant
        findings.append(Finding(kind="drift", numbers=(drift,)))
    if window.outliers:
        findings.append(Finding(kind="outliers", numbers=(window.outliers, window.steps)))
    if not_finite := sum(not step.finite for step in steady):
        findings.append(Finding(kind="not finite", numbers=(not_finite, window.steps)))
    if states is not None:
        findings.append(Finding(kind="two speeds", numbers=(states.share_high, states.high, states.low)))
    return findings


def _of_run(run: RunRecord) -> list[Finding]:
    findings = [Finding(kind="caution", subjects=(caution,)) for caution in cautions(run.evidence)]
    if captures_layers(run.engine_options):
        findings.append(Finding(kind="memory of graphs"))
    start, end = map(_instant, (run.started_at, run.ended_at))
    if start and (start > datetime.now(timezone.utc) + timedelta(days=1) or (end and end < start)):
        findings.append(Finding(kind="wrong clock", subjects=(str(run.started_at), run.ended_at or "at an unknown time")))
    if run.clock == "framework":
        findings.append(Finding(kind="framework's clock"))
    own = run.environment or {}
    for rank, node in enumerate(run.nodes):
        for name, value in node.other_variables.items():
            names = (name, own.get(name, "not set"), value or "not set", node.host)
            findings.append(Finding(kind="unlike variable", subjects=names, numbers=(rank,)))
    return findings + stragglers(run)


def _instant(text: str | None) -> datetime | None:
    time = datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
    return time.replace(tzinfo=timezone.utc) if time and not time.tzinfo else time


def stragglers(run: RunRecord) -> list[Finding]:
    """Return the ranks that make the others wait: those that take clearly longer than the other ranks of their pipeline stage."""
    times, stages = run.rank_seconds, run.ran.pipeline_parallel or 1
    if run.machine.platform == "cpu" or len(times) % stages:  # processes on a CPU take turns on its cores
        return []
    size = len(times) // stages  # Megatron-Core numbers the ranks of one stage consecutively
    gpus, findings = run.machine.gpus_per_node or len(times), []
    for rank, seconds in enumerate(times):
        likes = times[rank // size * size : (rank // size + 1) * size]
        usual = float(np.median(likes))
        if len(likes) > 1 and usual > 0 and seconds > 1.05 * usual:  # so that small spreads are not named
            host = f" on {run.nodes[rank // gpus].host}" if len(run.nodes) > rank // gpus else ""
            place = f"rank {rank} (GPU {rank % gpus}{host})"
            findings.append(Finding(kind="straggler", subjects=(place,), numbers=(seconds / usual - 1,)))
    return findings


def held_back(samples: Sequence[TelemetrySample], steady: Sequence[StepRecord]) -> dict[str, float]:
    """Return what held clocks back, with its share of the readings during the steady steps; of all where no reading is theirs."""
    within = during(samples, steady) or samples
    counts = Counter(reason for sample in within for reason in sample.throttle_reasons if _is_one_of(THROTTLING, reason))
    return {reason: count / len(within) for reason, count in sorted(counts.items())}


def gpu_busy(samples: Sequence[TelemetrySample], steady: Sequence[StepRecord]) -> float | None:
    """Return the share of time in which any kernel ran on a GPU during the steady steps; None where no reading is theirs.

    It is NVML's and AMD SMI's utilization, which says nothing of how well a kernel uses a GPU.
    """
    return _mean(sample.utilization for sample in during(samples, steady))


def during(samples: Sequence[TelemetrySample], steady: Sequence[StepRecord]) -> Sequence[TelemetrySample]:
    """Return the readings during some consecutive steps; none where the steps do not say when they were."""
    first, last = steady[0].ended_at_seconds, steady[-1].ended_at_seconds
    if first is None or last is None:
        return ()
    start = first - steady[0].step_seconds
    return [sample for sample in samples if start <= sample.at_seconds <= last]


def of_machine(reason: str, share: float) -> bool:
    """Whether a throttle reason, in a share of the readings, is a state of the machine, such as heat, and not its power limit.

    Lowered clocks are one where all readings show them.
    """
    return _is_one_of(OF_MACHINE, reason) or (_is_one_of([LOWERED], reason) and share >= 0.99)


def _is_one_of(words: Sequence[str], reason: str) -> bool:
    return any(word in reason.lower() for word in words)


def step_rates(run: RunRecord, step: StepRecord) -> tuple[float | None, float | None]:
    """Return the tokens/s of all ranks in one step, and the FLOP/s of a GPU but for CPUs: for the live line, no result."""
    tokens = step.tokens / step.step_seconds if step.tokens and step.step_seconds > 0 else None
    flop, gpus = _flop_per_token(run, "causal", step.dropped)[0], run.machine.gpus
    return tokens, tokens * flop / gpus if tokens and flop and gpus and run.machine.platform != "cpu" else None
