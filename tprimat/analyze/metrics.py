"""Derive the metrics of a run from its steps. Everything that prints or draws a rate gets it from `run_metrics`."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tprimat.analyze.memory import ran_from_graphs, steps_without_graphs, tensor_memory
from tprimat.analyze.window import REQUESTED, Warmup, is_state, steady_steps, steady_window
from tprimat.core import units
from tprimat.core.accelerators import peak_dense_flops, peak_sparse_flops
from tprimat.core.flops import flop_per_token, seed_flop_per_token
from tprimat.core.statistics import Array, Interval, TwoStates, median_interval, ratio_of_sums, scaled_mad, two_states
from tprimat.records.benchmark_file import StatedEnergy
from tprimat.records.evidence import cautions
from tprimat.records.schema import Estimate, Machine, RunMetrics, RunPrediction, RunRecord, StepRecord, TelemetrySample, Window
from tprimat.records.summary import largest


def joules(samples: Sequence[TelemetrySample], steps: Sequence[StepRecord], gpus: int) -> tuple[float | None, str | None]:
    """Return the energy that all GPUs drew over the steps: power integrated by the trapezoid rule, GPU by GPU.

    Args:
        samples: readings of one run, in any order; those without power are passed over.
        steps: consecutive steps; they need `ended_at_seconds`.
        gpus: world size. Readings of fewer or more GPUs than ran give no figure: what is missing is not guessed.

    Returns:
        Joules and None, or None and why (None and None where nothing was read at all).
    """
    readings = [sample for sample in samples if sample.power_watts is not None]
    if not readings:
        return None, None
    first, last = steps[0].ended_at_seconds, steps[-1].ended_at_seconds
    if first is None or last is None:
        return None, "energy absent: the steps do not say when they ended"
    start = first - steps[0].step_seconds * steps[0].merged
    by_gpu: dict[int, list[TelemetrySample]] = defaultdict(list)
    for sample in readings:
        by_gpu[sample.gpu].append(sample)
    if len(by_gpu) != gpus:
        return None, f"energy absent: power was read on {len(by_gpu)} of {gpus} GPUs"
    total = 0.0
    for gpu, series in sorted(by_gpu.items()):
        part = _integral(series, start, last)
        if part is None:
            return None, f"energy absent: power readings of GPU {gpu} do not span the steady steps"
        total += part
    return total, None


def _integral(series: Sequence[TelemetrySample], start: float, end: float) -> float | None:
    """Return joules between two times; None where readings stop or pause for more than two sampling intervals."""
    ordered = sorted((sample.at_seconds, sample.power_watts) for sample in series if sample.power_watts is not None)
    times = np.array([at for at, _ in ordered])
    watts = np.array([power for _, power in ordered])
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


# The one place where a metric is computed. Everything that prints or draws a rate got it from `run_metrics`.

Convention = Literal["causal", "full", "6n"]

NOTABLE_DRIFT = 0.005
"""Relative change of step time over a window that is worth a warning; long runs show smaller trends, which are irrelevant."""
STATED_TOLERANCE = 0.02
"""Tolerated between a stated throughput and ours: another choice of warm-up steps makes a percent or two."""
SAME_STEPS = 0.8
"""Share of the steps in which a file's window and ours must agree for its energy of a token to be ours."""
EXPLODED = 1e8
"""A gradient norm that no sound training has in most of its steps. Models that start at random have up to 300, later about 1;
even the gradient of a sum over 16 million tokens, where others take the mean, then has less than this."""
OF_MACHINE = ("thermal", "hot", "brake", "slowdown")
"""Throttle reasons of NVML and AMD SMI that are a state of the machine, which another day may not have."""
THROTTLING = (*OF_MACHINE, "power", "cap")
"""Throttle reasons that mean a clock below the requested one. A power cap belongs to the configuration that draws the power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOptions:
    """How metrics are counted. The defaults are what a fair comparison uses."""

    flops_convention: Convention = "causal"
    warmup: Warmup = "auto"
    peak: Literal["dense", "sparse"] = "dense"
    """sparse only to reproduce figures published against the peak with 2:4 sparsity, which no dense training can reach."""
    cost_per_gpu_hour: float | None = None
    """In the user's currency."""
    telemetry: Sequence[TelemetrySample] = ()
    held_back: Mapping[str, float] | None = None
    """What a file states of clocks that were held back, for runs without telemetry."""
    gpu_busy: float | None = None
    """What a file states of the share of time in which any kernel ran, likewise."""
    stated_energy: StatedEnergy | None = None
    """What a file states of energy, likewise; used where it is of the same steps."""
    gemm_ceiling_flops: float | None = None
    """Best matrix multiplication rate that was measured on this accelerator in this dtype, FLOP/s."""
    gemm_ceiling_notes: tuple[str, ...] = ()
    """Why measured rates were excluded; they become warnings."""
    seed_conventions: bool = False
    """Count as the first TPrimat did: 6n of rounded sizes, a bf16 peak that is sparse on NVIDIA, and tokens/s as stated."""
    stated_tokens_per_second: float | None = None
    """Throughput that the file of another program states; checked, and used under seed_conventions."""


def run_metrics(run: RunRecord, steps: Sequence[StepRecord], *, options: MetricOptions = MetricOptions()) -> RunMetrics:
    """Derive every number of one run.

    Raises:
        MetricError: no steady step, or a damaged step time.
    """
    window = steady_window(steps, options.warmup, run.profiled_steps, steps_without_graphs(run))
    steady = steady_steps(tensor_memory(run, steps), window)
    dropped = _mean(step.dropped for step in steady)
    speed = _speed(run, options, steady, dropped)
    seconds, flops, read = speed.seconds, speed.flops_per_gpu, options.telemetry
    per_token, of_energy = _joules_per_token(run, options, steady, window)
    foretold = None if drops_choices(run, dropped) else run.prediction
    clocks = held_back(read, steady) if read else options.held_back
    return RunMetrics(
        window=window,
        step_seconds=scaled(_unless(speed.states, median_interval(seconds)), 1.0, window.steps),
        mean_step_seconds=float(seconds.mean()),
        steps_per_second=1 / float(seconds.mean()),
        step_seconds_mad=scaled_mad(seconds),
        tokens_per_second=speed.rate.value if speed.rate else None,
        tokens_per_second_per_gpu=speed.rate_per_gpu,
        flop_per_token=speed.flop_per_token,
        flops_convention="6n" if options.seed_conventions else options.flops_convention,
        model_flops_per_second_per_gpu=flops,
        peak_dense_flops=speed.peak,
        mfu=speed.mfu,
        mfu_absent_because=speed.no_mfu,
        share_of_measured_gemm=flops.value / options.gemm_ceiling_flops if flops and options.gemm_ceiling_flops else None,
        measured_gemm_flops=options.gemm_ceiling_flops,
        peak_memory_bytes=largest(step.peak_allocated_bytes for step in steady),
        peak_reserved_bytes=largest(step.peak_reserved_bytes for step in steady),
        predicted_memory_error=_memory_error(foretold, steady),
        predicted_step_error=_step_error(foretold, seconds),
        final_loss=next((step.loss for step in reversed(steps) if step.loss is not None), None),
        joules_per_token=per_token,
        cost_per_million_tokens=_cost(options.cost_per_gpu_hour, speed.rate_per_gpu),
        expert_load=_mean(step.expert_load for step in steady),
        rank_load=_mean(step.rank_load for step in steady),
        dropped=dropped,
        held_back=None if clocks is None else dict(clocks),
        gpu_busy=gpu_busy(read, steady) if read else options.gpu_busy,
        warnings=(
            *impossible(speed.mfu),
            *_warnings(run, steps, steady, window),
            *_two_speeds(speed.states),
            *_contradiction(options.stated_tokens_per_second, speed.measured),
            *(*_throttling(clocks), *((of_energy,) if of_energy else ()), *options.gemm_ceiling_notes),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speed:
    """How fast the steady steps were, in tokens and in FLOP."""

    seconds: Array
    """Of each step."""
    states: TwoStates | None
    measured: Interval | None
    """Tokens/s of the steps."""
    rate: Interval | None
    """Tokens/s that count: those of the steps, or under seed_conventions those that a file states."""
    rate_per_gpu: Estimate | None
    flop_per_token: float | None
    flops_per_gpu: Estimate | None
    peak: float | None
    """FLOP/s of one GPU."""
    mfu: Estimate | None
    no_mfu: str | None
    """Why there is none."""


def _speed(run: RunRecord, options: MetricOptions, steady: Sequence[StepRecord], dropped: float | None) -> _Speed:
    """Return the speed of the steady steps.

    Throughput is sum(tokens) / sum(seconds): a ratio of sums, so a slow step weighs what it costs. Model FLOP count what the
    model needs, not what recomputation repeats; MFU (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) divides them by the
    dense peak of the dtype that ran.
    """
    gpus, count, seconds = run.machine.gpus, len(steady), np.array([step.step_seconds for step in steady])
    tokens, states = _tokens(steady), two_states(seconds)
    measured = _unless(states, ratio_of_sums(tokens, seconds)) if tokens is not None else None
    rate = _stated(options) or measured
    flop, no_flop = _seed_flop(run) if options.seed_conventions else _flop_per_token(run, options.flops_convention, dropped)
    peak, no_peak = _peak(run, options)
    flops = scaled(rate, flop / gpus, count) if rate and gpus and flop else None
    return _Speed(
        seconds=seconds,
        states=states,
        measured=measured,
        rate=rate,
        rate_per_gpu=scaled(rate, 1 / gpus, count) if rate and gpus else None,
        flop_per_token=flop,
        flops_per_gpu=flops,
        peak=peak,
        mfu=scaled(flops, 1 / peak, count) if flops and peak else None,
        no_mfu=None if flops and peak else no_peak or no_flop or _no_rate(rate, gpus),
    )


def drops_choices(run: RunRecord, dropped: float | None) -> bool:
    """Whether a run computes less than its prediction, which knows of no full expert. `dropped` is the recorded share."""
    return isinstance(run.ran.expert_capacity, float | int) if dropped is None else dropped > 0


def _memory_error(prediction: RunPrediction | None, steady: Sequence[StepRecord]) -> float | None:
    """Compare the predicted peak with the allocated one; with the reserved one where a framework prints no other."""
    allocated = largest(step.peak_allocated_bytes for step in steady)
    reserved = largest(step.peak_reserved_bytes for step in steady)
    if prediction is None or not (allocated or reserved):
        return None
    if allocated:
        return prediction.allocated_bytes / allocated - 1
    return prediction.reserved_bytes / (reserved or 1) - 1


def _step_error(prediction: RunPrediction | None, seconds: Array) -> float | None:
    predicted = prediction.step_seconds if prediction else None
    return None if predicted is None else predicted / float(np.median(seconds)) - 1


def _unless(states: TwoStates | None, interval: Interval) -> Interval:
    """Return an interval without its ends where steps switch between two speeds, which no formula here covers."""
    return interval if states is None else Interval(value=interval.value, low=None, high=None)


STRAGGLING = 0.05
"""How much longer than its peers a rank takes for its own part of a step before it is named."""


def stragglers(run: RunRecord) -> tuple[str, ...]:
    """Return the ranks that make the others wait: those that take clearly longer than the other ranks of their pipeline stage."""
    times, stages = run.rank_seconds, run.ran.pipeline_parallel or 1
    if run.machine.platform == "cpu" or len(times) % stages:  # processes on a CPU take turns on its cores
        return ()
    size = len(times) // stages  # Megatron-Core numbers the ranks of one stage consecutively
    found = []
    for rank, seconds in enumerate(times):
        likes = times[rank // size * size : (rank // size + 1) * size]
        usual = float(np.median(likes))
        if len(likes) > 1 and usual > 0 and seconds > usual * (1 + STRAGGLING):
            gpus = run.machine.gpus_per_node or len(times)
            host = f" on {run.nodes[rank // gpus].host}" if len(run.nodes) > rank // gpus else ""
            longer = units.percent(seconds / usual - 1)
            found.append(f"rank {rank} (GPU {rank % gpus}{host}) takes {longer} longer than its peers, which wait")
    return tuple(found)


def _merged(steady: Sequence[StepRecord]) -> tuple[str, ...]:
    most = max(step.merged for step in steady)
    return (f"a long run: each sample is the mean of up to {most} consecutive steps",) if most > 1 else ()


def _two_speeds(states: TwoStates | None) -> tuple[str, ...]:
    if states is None:
        return ()
    slow = f"{units.percent(states.share_high, 0)} take {states.high:.4g} s, the others {states.low:.4g} s"
    return (f"steps switch between two speeds ({slow}): no interval holds; look at the clocks, and run longer",)


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


def _flop_per_token(run: RunRecord, convention: Convention, dropped: float | None) -> tuple[float | None, str | None]:
    if run.ran.shape is None:
        return None, f"the shape of model {run.model!r} is not recorded"
    if run.engine == "torchtune":
        return None, "torchtune's log does not tell which weights it trains (LoRA: few), nor where attention ends"
    if run.ran.sequence_tokens is None:
        return None, "the sequence length is not recorded"
    if dropped is None and drops_choices(run, None):
        return (
            None,
            f"experts are full at a capacity of {run.ran.expert_capacity:g}, and how many choices they dropped is not recorded",
        )
    return flop_per_token(run.ran.shape, run.ran.sequence_tokens, convention, dropped or 0.0), None


def _seed_flop(run: RunRecord) -> tuple[float | None, str | None]:
    flop = None if run.ran.shape is None else seed_flop_per_token(run.ran.shape.name)
    return flop, None if flop else f"the first TPrimat had no FLOP count for model {run.model!r}"


def _stated(options: MetricOptions) -> Interval | None:
    if not options.seed_conventions or options.stated_tokens_per_second is None:
        return None
    return Interval(value=options.stated_tokens_per_second, low=None, high=None)


def _contradiction(stated: float | None, measured: Interval | None) -> tuple[str, ...]:
    if stated is None or measured is None or abs(stated / measured.value - 1) <= STATED_TOLERANCE:
        return ()
    return (f"the file states {stated:,.0f} tokens/s, but its batch, sequence and step times make {measured.value:,.0f}",)


def _peak(run: RunRecord, options: MetricOptions) -> tuple[float | None, str | None]:
    """Return the peak FLOP/s of one GPU, or why there is none. Never the peak of another GPU."""
    kind, dtype = options.peak, run.ran.matmul_dtype
    if options.seed_conventions:
        kind, dtype = ("sparse" if run.machine.platform == "cuda" else "dense"), "bf16"
    if run.machine.platform == "cpu":
        return None, "a CPU has no published matrix peak to compare with"
    if run.machine.accelerator is None:
        return None, "the accelerator is not recorded"
    if dtype is None:
        return None, "the dtype that ran is not known"
    lookup = peak_dense_flops if kind == "dense" else peak_sparse_flops
    peak = lookup(run.machine.accelerator, dtype)
    return peak, None if peak else f"no {kind} {dtype} peak is known for {run.machine.accelerator}"


def _joules_per_token(
    run: RunRecord, options: MetricOptions, steps: Sequence[StepRecord], window: Window
) -> tuple[float | None, str | None]:
    """Return the joules of a token over the steady steps, which must be consecutive, and a note on them or why there are none."""
    tokens, gpus, stated = _tokens(steps), run.machine.gpus, options.stated_energy
    if gpus is None or tokens is None:
        return None, None
    if not options.telemetry and stated is not None:
        share = _shared_steps(stated.window, window)
        if share == 1:
            return stated.joules_per_token, None
        of_steps = f"steps {stated.window.first_step}-{stated.window.last_step}"
        if share >= SAME_STEPS:
            return stated.joules_per_token, f"energy is that of {of_steps}, as the file states it"
        return None, f"energy absent: the file states it of {of_steps}"
    if window.left_out and options.telemetry:
        return None, "energy absent: profiled steps lie between the steady ones"
    energy, why = joules(options.telemetry, steps, gpus)
    if why is not None and (unread := _nodes_unread(run.machine, options.telemetry)):
        return None, f"energy absent: no power was read on {unread}; its readings may be on its own disk"
    return None if energy is None else energy / float(tokens @ np.array([step.merged for step in steps])), why


def _shared_steps(first: Window, second: Window) -> float:
    """Return the share of the steps of either window that lie in both. A file may state any numbers: nothing is enumerated."""
    alone = [_steps_in(one.first_step, one.last_step, one.left_out) for one in (first, second)]
    left_out = (*first.left_out, *second.left_out)
    both = _steps_in(max(first.first_step, second.first_step), min(first.last_step, second.last_step), left_out)
    return both / max(sum(alone) - both, 1)


def _steps_in(first: int, last: int, left_out: Iterable[int]) -> int:
    """Return how many steps there are from `first` to `last` without those left out."""
    return max(0, last + 1 - first - sum(first <= step <= last for step in set(left_out)))


def _nodes_unread(machine: Machine, samples: Sequence[TelemetrySample]) -> str:
    """Return the nodes without power readings if others have some: 'node 1 of 2'."""
    if not machine.gpus_per_node or not machine.nodes:
        return ""
    read = {sample.gpu // machine.gpus_per_node for sample in samples if sample.power_watts is not None}
    unread = [f"node {node}" for node in range(machine.nodes) if node not in read]
    return f"{', '.join(unread)} of {machine.nodes}" if unread else ""


def _no_rate(rate: Interval | None, gpus: int | None) -> str:
    return "the tokens of a step are not recorded" if rate is None else "the number of GPUs is not recorded"


def _cost(price: float | None, per_gpu: Estimate | None) -> float | None:
    """Convert the price of a GPU hour to the price of a million tokens."""
    return None if price is None or per_gpu is None else price / (per_gpu.value * 3600) * 1e6


def unlike_variables(run: RunRecord) -> tuple[str, ...]:
    """Name the variables that tune libraries and differ between the nodes of a run, each with both values."""
    own = run.environment or {}
    return tuple(
        f"{name} is {own.get(name, 'not set')} on node 0, and {value or 'not set'} on node {rank} ({node.host})"
        for rank, node in enumerate(run.nodes)
        for name, value in node.other_variables.items()
    )


def _warnings(run: RunRecord, steps: Sequence[StepRecord], steady: Sequence[StepRecord], window: Window) -> tuple[str, ...]:
    found = [f"not counted: {mismatch}" for mismatch in run.mismatches]
    if run.outcome != "completed":
        found.append(f"the run did not complete: {run.outcome}")
    if window.steps < 10:
        found.append(f"only {window.steps} steady step{'s' * (window.steps > 1)}; 10 or more make an interval trustworthy")
    found += _first_stretch(steps, steady, window, run.profiled_steps)
    if window.drift_per_step is not None and abs(window.drift_per_step * window.steps) >= NOTABLE_DRIFT:
        drift = units.signed_percent(window.drift_per_step * window.steps)
        found.append(f"step time drifts by {drift} over the steady steps (Mann-Kendall, p < 0.05)")
    if window.outliers:
        found.append(
            f"outliers among the {window.steps} steady steps: {window.outliers} (3 scaled MAD); throughput includes them, "
            "and its interval may be too narrow"
        )
    if not_finite := sum(not step.finite for step in steady):
        found.append(f"{not_finite} of {window.steps} steady steps have a skipped update, or a loss or norm that is not finite")
    found += _exploded(steady)
    found += cautions(run.evidence)
    if ran_from_graphs(run):
        known = any(step.peak_reserved_bytes for step in steady)
        told = "memory is what torch reserved" if known else "no memory is shown, because what torch reserved is not recorded"
        found.append(f"{told}: it does not count what CUDA graphs hold as allocated")
    if run.clock == "framework":
        found.append("step times are the framework's own, not measured at the end of each step")
    return (*found, *_merged(steady), *stragglers(run), *unlike_variables(run))


def _exploded(steady: Sequence[StepRecord]) -> list[str]:
    """Warn of gradients that no model has, which clipping hides from the loss. Single steps may have them."""
    norms = [step.grad_norm for step in steady if step.grad_norm is not None]
    usual = statistics.median(norms) if norms else 0.0
    if usual <= EXPLODED:
        return []
    return [f"the median gradient norm is {usual:.1e}, which no sound training has: the speed counts, the losses do not"]


def _first_stretch(
    steps: Sequence[StepRecord], steady: Sequence[StepRecord], window: Window, profiled: Sequence[int]
) -> list[str]:
    """Warn of a long first stretch at another speed, which is a state of the machine rather than warm-up."""
    cut = [step.step_seconds for step in steps if 1 < step.step < window.first_step and step.step not in profiled]
    if not is_state(len(cut), len(steps)):
        return []
    counted = [step.step_seconds for step in steady]
    change = statistics.fmean(cut + counted) / statistics.fmean(counted) - 1
    length = f"{units.percent(abs(change))} {'longer' if change > 0 else 'less'}"
    if window.rule.startswith(REQUESTED):
        return [f"{len(cut)} steps after step 1 are left out as requested; with them a mean step takes {length}"]
    kind = "slow" if statistics.fmean(cut) > statistics.fmean(counted) else "fast"
    found = [f"{len(cut)} {kind} steps after step 1 are left out; with them a mean step takes {length}"]
    if len(cut) >= (len(steps) - 1) // 2:
        found.append("the speed still changes in the middle of the run: run longer to see it steady")
    return found


def impossible(mfu: Estimate | None) -> tuple[str, ...]:
    """Warn where a rate exceeds what the accelerator can do."""
    if mfu is None or mfu.value <= 1:
        return ()
    share = units.percent(mfu.value, 0)
    return (f"MFU is {share}, which no hardware can reach: model, GPU, dtype, batch or sequence are not what ran",)


def held_back(samples: Sequence[TelemetrySample], steady: Sequence[StepRecord]) -> dict[str, float]:
    """Return what held clocks back, with its share of the readings during the steady steps; of all where no reading is theirs."""
    within = _during(samples, steady) or samples
    counts = Counter(reason for sample in within for reason in sample.throttle_reasons if _throttles(reason))
    return {reason: count / len(within) for reason, count in sorted(counts.items())}


def gpu_busy(samples: Sequence[TelemetrySample], steady: Sequence[StepRecord]) -> float | None:
    """Return the share of time in which any kernel ran on a GPU during the steady steps; None where no reading is theirs.

    It is NVML's and AMD SMI's utilization, which says nothing of how well a kernel uses a GPU.
    """
    return _mean(sample.utilization for sample in _during(samples, steady) if sample.utilization is not None)


def _during(samples: Sequence[TelemetrySample], steady: Sequence[StepRecord]) -> Sequence[TelemetrySample]:
    """Return the readings during the steady steps; none where the steps do not say when they were."""
    first, last = steady[0].ended_at_seconds, steady[-1].ended_at_seconds
    if first is None or last is None:
        return ()
    start = first - steady[0].step_seconds * steady[0].merged
    return [sample for sample in samples if start <= sample.at_seconds <= last]


def _throttles(reason: str) -> bool:
    return any(word in reason.lower() for word in THROTTLING)


def of_machine(reason: str) -> bool:
    """Whether a throttle reason is a state of the machine, such as heat, rather than its power limit."""
    return any(word in reason.lower() for word in OF_MACHINE)


def _throttling(clocks: Mapping[str, float] | None) -> tuple[str, ...]:
    if not clocks:
        return ()
    found = (f"clocks were held back in {units.percent(share, 0)} of the readings: {reason}" for reason, share in clocks.items())
    return ("; ".join(found),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """Rates of a single step, for the live line; results come from windows."""

    tokens_per_second: float | None
    model_flops_per_second_per_gpu: float | None
    """None on a CPU, where it would mean nothing."""


def step_rates(run: RunRecord, step: StepRecord) -> StepRates:
    """Return the throughput of one step over all ranks, and the model FLOP/s of one GPU."""
    tokens = step.tokens / step.step_seconds if step.tokens and step.step_seconds > 0 else None
    flop, _ = _flop_per_token(run, "causal", step.dropped)
    gpus = run.machine.gpus
    flops = tokens * flop / gpus if tokens and flop and gpus and run.machine.platform != "cpu" else None
    return StepRates(tokens_per_second=tokens, model_flops_per_second_per_gpu=flops)
