"""Decide which micro-batch size to try next in the search for the largest that fits. Pure functions of earlier trials.

The memory of a step is linear in the size of the micro-batch: weights, gradients and optimizer states are constant,
activations grow in proportion. So two small sizes predict the limit, and one more step with the largest size that the line
allows checks the prediction. A size that the line rules out is never tried.
"""

from collections.abc import Sequence
from dataclasses import replace

from tprimat.core.workload import KEPT_FREE, FullWorkload, Layout
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import MicroBatchSearch, MicroBatchTrial


def candidates(workload: FullWorkload) -> tuple[int, ...]:
    """Return the sizes that give every replica whole micro-batches, in ascending order.

    The interleaved schedule runs micro-batches in rounds of one per stage, so it needs a multiple of the number of stages.
    """
    layout = workload.layout
    share = workload.global_batch_sequences // layout.data
    unit = layout.pipeline if layout.virtual_pipeline else 1
    return tuple(size for size in range(1, share + 1) if share % size == 0 and (share // size) % unit == 0)


def trial_micro_batches(layout: Layout, accumulation_steps: int) -> int:
    """Return the micro-batches of a trial's step: just enough that a pipeline holds as many at once as in a whole step."""
    return min(accumulation_steps, 2 * layout.pipeline * (layout.virtual_pipeline or 1))


def next_candidate(sizes: Sequence[int], trials: Sequence[MicroBatchTrial]) -> int | None:
    """Return which of some ascending sizes to try next, or None once the largest that fits is known."""
    best = largest_that_fits(trials)
    too_large = min((trial.micro_batch_sequences for trial in trials if not trial.fits), default=None)
    open_sizes = [size for size in sizes if (best or 0) < size and (too_large is None or size < too_large)]
    if not open_sizes:
        return None
    if len([trial for trial in trials if trial.fits]) < 2:
        return open_sizes[0]
    limit = min(trial.limit_bytes for trial in trials if trial.limit_bytes is not None)
    allowed = [size for size in open_sizes if predicted_bytes(trials, size) <= limit]
    if too_large is not None and allowed:  # the line was wrong once, so bisect instead
        return allowed[len(allowed) // 2]
    return allowed[-1] if allowed else None


def largest_that_fits(trials: Sequence[MicroBatchTrial]) -> int | None:
    """Return the largest size that has fit so far."""
    return max((trial.micro_batch_sequences for trial in trials if trial.fits), default=None)


def predicted_bytes(trials: Sequence[MicroBatchTrial], size: int) -> int:
    """Predict the memory of a size from the line through the two largest measured sizes."""
    peaks = sorted((trial.micro_batch_sequences, trial.peak_bytes) for trial in trials if trial.peak_bytes is not None)
    (less, low), (more, high) = peaks[-2:]
    return round(high + (size - more) * (high - low) / (more - less))


def searched(sizes: Sequence[int], trials: Sequence[MicroBatchTrial]) -> MicroBatchSearch:
    """Return the record of a search."""
    measured = {trial.micro_batch_sequences for trial in trials if trial.peak_bytes is not None}
    larger = [size for size in sizes if size > (largest_that_fits(trials) or 0)]
    untried = [size for size in larger if size not in {trial.micro_batch_sequences for trial in trials}]
    return MicroBatchSearch(
        candidates=tuple(sizes),
        kept_free=KEPT_FREE,
        trials=tuple(trials),
        predicted_bytes={size: predicted_bytes(trials, size) for size in untried} if len(measured) > 1 else {},
    )


def with_micro_batch(plan: RunPlan, search: MicroBatchSearch, size: int) -> RunPlan:
    """Return the plan with the size that was found."""
    return replace(plan, micro_batch_search=search, workload=replace(plan.workload, micro_batch_sequences=size))


def as_asked(plan: RunPlan) -> RunPlan:
    """Return the plan as it was before the search for its micro-batch."""
    if plan.micro_batch_search is None:
        return plan
    return replace(plan, micro_batch_search=None, workload=replace(plan.workload, micro_batch_sequences=None))
