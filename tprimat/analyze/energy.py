"""Energy of a window of steps, from power readings."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tprimat.record.schema import StepRecord, TelemetrySample


def joules(samples: Sequence[TelemetrySample], steps: Sequence[StepRecord], gpus: int) -> tuple[float | None, str | None]:
    """Energy that all GPUs drew over the steps: power integrated by the trapezoid rule, GPU by GPU.

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
    start = first - steps[0].step_seconds
    by_gpu: dict[int, list[TelemetrySample]] = defaultdict(list)
    for sample in readings:
        by_gpu[sample.gpu].append(sample)
    if len(by_gpu) != gpus:
        return None, f"energy absent: power was read on {len(by_gpu)} GPU(s), and {gpus} ran"
    total = 0.0
    for gpu, series in sorted(by_gpu.items()):
        part = _integral(series, start, last)
        if part is None:
            return None, f"energy absent: power readings of GPU {gpu} do not span the steady steps"
        total += part
    return total, None


def _integral(series: Sequence[TelemetrySample], start: float, end: float) -> float | None:
    """Joules between two times; None where readings stop more than two sampling intervals before an end, or pause that long."""
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
