"""Check whether a run diverged, and whether two sides of a comparison reach the same losses: pairs on one seed and the same data.

The quantity is the relative difference of the losses, candidate over reference - 1, as a mean over the later half of the steps.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tprimat.analyze.traits import TRAITS, tokens_per_step
from tprimat.core import statistics
from tprimat.core.rows import DATA, document
from tprimat.core.statistics import Array, Interval, median, scaled_mad
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import Finding, StepRecord

LIMITS: Mapping[str, float] = document(DATA / "tolerances.yaml")["losses"]
NOT_A_NUMBER = Interval(value=float("inf"), low=float("inf"), high=float("inf"))
"""The difference where a loss is not a number."""
LOSS_MARGIN = 0.02
"""Difference of losses above which a gain in speed does not win."""

LossCurve = Mapping[int, float]
"""Step -> loss; not a number where the loss was none."""
Pairs = dict[object, list[tuple[LossCurve, LossCurve]]]
"""Seed -> curves of reference and candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """Whether two sides of a comparison of speeds reach the same losses."""

    outcome: Literal["same", "different", "undecided"]
    difference: Interval = NOT_A_NUMBER
    """Relative difference of the losses, candidate over reference - 1."""
    steps: tuple[int, int] = (0, 0)
    """First and last step that it averages."""
    open_because: Finding | None = None
    """Why it is undecided."""
    paired: bool = True
    """Whether it compares runs of one seed."""
    silent: str = ""
    """baseline or candidate, where only that side has a run without losses."""


def divergence(steps: Sequence[StepRecord], vocabulary: int | None = None) -> tuple[Finding, ...]:
    """Return whether losses rose for good: the last eighth above the lowest stretch before, or the last third above the second.

    How far is judged by the noise of the first half, which a late jump does not inflate. Losses that never fall diverged as well
    where they end far above that of a model that knows nothing, the log of the vocabulary's size.
    """
    losses = np.array([step.loss for step in steps if step.loss is not None and step.finite])
    count = len(losses)
    if count < LIMITS["fewest_losses"]:
        return ()
    length = max(3, count // 8)
    early = losses[:-length]
    end = float(np.quantile(losses[-length:], 0.5 if length < 5 else 0.6))  # of two levels in turn the higher one
    lowest = float(np.median(sliding_window_view(early, length), axis=1).min())
    half = early[: max(4, count // 2)]
    later = half[len(half) // 2 :]  # flatter than the first steps
    places = np.arange(len(later))
    off_line = later - np.polyval(np.polyfit(places, later, 1), places) if len(later) > 3 else np.zeros(1)
    order = 1 + (len(half) > 5)  # of differences, which a curve that falls does not widen
    noise = max(scaled_mad(np.diff(half, order)) / math.sqrt(math.comb(2 * order, order)), scaled_mad(off_line))
    third = count // 3
    before, after = median(losses[-2 * third : -third]), median(losses[-third:])
    of_thirds = [(before, after, LIMITS["rise_in_errors"] * math.sqrt(2 / third))] if third >= LIMITS["fewest_losses"] else []
    for low, high, least in ((lowest, end, LIMITS["rise_in_noise"]), *of_thirds):
        if high > low + LIMITS["rise"] * abs(low) and high - low > least * noise:
            return (Finding(kind="diverged", numbers=(low, high)),)
    unlearned = math.log(vocabulary) if vocabulary else math.inf
    if end > max(LIMITS["far_from_nothing"] * unlearned, (1 - LIMITS["clear_fall"]) * float(losses[0])):
        return (Finding(kind="diverged", numbers=(unlearned, end)),)
    return ()


def same_training(result: RunResult) -> dict[str, Hashable]:
    """Return what runs share whose losses must come near each other, whatever their engine, seed, dtype or learning rates.

    Unrecorded data is taken to be the same within one engine only. The number of steps sets the learning rates.
    """
    run = result.run
    work = {key: TRAITS[key].value(run) for key in ("model", "shape", "sequence", "tokens", "data")}
    return {**work, "engine": None if work["data"] else run.engine, "steps": len(result.steps)}


def far_above(results: Sequence[RunResult]) -> list[Finding | None]:
    """Return for each run of one training whether its loss never fell, or ends far above the lowest among those that fell."""
    curves = [{step.step: step.loss for step in one.steps if step.loss is not None} for one in results]
    ends = [(place, *_ends(list(curve.values()))) for place, curve in enumerate(curves) if len(curve) >= LIMITS["fewest_losses"]]
    learned = [(end, place) for place, start, end, _ in ends if end < (1 - LIMITS["fall"]) * start]
    if not learned:
        return [None] * len(results)
    best = min(learned)[1]
    return [_far(curves[best], curve, results[best].run.run_id) for curve in curves]


def _far(reference: Mapping[int, float], curve: Mapping[int, float], name: str) -> Finding | None:
    steps = sorted(reference.keys() & curve.keys())
    if len(steps) < LIMITS["fewest_losses"]:
        return None
    (start, end, error), (first, last, _) = (_ends([one[step] for step in steps]) for one in (reference, curve))
    last = min(last, _ends(list(curve.values()))[1])  # a longer run may come down later
    level = end if len(steps) >= LIMITS["fewest_to_be_far"] else start
    stays = last > end and last > (1 - LIMITS["no_fall"]) * first and end < (1 - LIMITS["clear_fall"]) * start
    as_long = len(curve) == len(reference)  # the number of steps sets learning rates
    if stays or (as_long and last > (1 + LIMITS["far"]) * level + LIMITS["rise_in_errors"] * error):
        return Finding(kind="far loss", subjects=(name,), numbers=(last, end))
    return None


def _ends(losses: Sequence[float]) -> tuple[float, float, float]:
    """Return the first losses and the last third, without its highest, which may be a spike; and the latter's standard error."""
    late = np.array(losses[-_last_third(len(losses)) :])
    error = float(np.diff(late).std(ddof=1)) / math.sqrt(2 * len(late))  # of differences, which a trend does not widen
    return median(np.asarray(losses[:3])), float(np.sort(late)[:-1].mean()), error


def check_losses(references: Sequence[RunResult], candidates: Sequence[RunResult]) -> LossCheck:
    """Compare the losses of two sides, pair by pair. Two engines make no pairs: they draw different weights from one seed."""
    sides = (("baseline", references), ("candidate", candidates))
    silent = [name for name, side in sides if not all(map(curve_of, side))]
    if len(silent) == 1 or not any(map(curve_of, (*references, *candidates))):
        nothing = Finding(kind="no losses", numbers=(len(silent),))
        return LossCheck(outcome="undecided", open_because=nothing, silent=silent[0] if len(silent) == 1 else "")
    if references[0].run.engine == candidates[0].run.engine:
        pairs, why = pairs_of(references, candidates)
        apart = judge(pairs, LOSS_MARGIN) if pairs else _far_apart(references, candidates)
    else:
        apart, why = None, Finding(kind="losses of two engines")
    unknown = LossCheck(outcome="undecided", open_because=why or Finding(kind="no common step"))
    return apart or _far_ends(references, candidates) or unknown


def _far_ends(references: Sequence[RunResult], candidates: Sequence[RunResult]) -> LossCheck | None:
    """Return a check by a run that is `far_above` one of the other side, where their data may be the same: it is not recorded."""
    runs = [*references, *candidates]
    works = {tuple(same_training(one)[name] for name in ("model", "shape", "sequence", "tokens")) for one in runs}
    if len(works) > 1 or len({TRAITS["data"].value(one.run) for one in runs} - {None}) > 1:
        return None
    for place, far in enumerate(far_above(runs)):
        if far is not None:
            ratio, steps = far.numbers[0] / far.numbers[1], sorted(curve_of(runs[place]))
            value = (1 / ratio if place < len(references) else ratio) - 1
            ends = steps[-_last_third(len(steps))], steps[-1]
            return LossCheck(outcome="different", difference=replace(NOT_A_NUMBER, value=value), steps=ends, paired=False)
    return None


def _far_apart(references: Sequence[RunResult], candidates: Sequence[RunResult]) -> LossCheck | None:
    """Compare two sides that differ only in seeds, as far as recorded: their means, and each of three runs with the other median.

    Seeds make no loss differ by a `rise`.
    """
    first, second = ([replace(one, run=replace(one.run, seed=0)) for one in side] for side in (references, candidates))
    if any(mismatch(first[0], one, unknown_alike=True) for one in (*first, *second)):
        return None
    curves = [[curve_of(one) for one in side] for side in (first, second)]
    steps = sorted(set.intersection(*(set(curve) for side in curves for curve in side)))
    if not steps:
        return None
    means, medians = (
        [{step: float(middle([curve[step] for curve in side])) for step in steps} for side in curves]
        for middle in (np.mean, np.median)
    )
    apart = _apart_at_the_end(_difference((means[0], means[1]), steps)[None], LIMITS["rise"])
    for rows in ([(medians[0], one) for one in curves[1]], [(one, medians[1]) for one in curves[0]]):
        if apart is None and len(rows) >= LIMITS["fewest_seeds"]:
            apart = _apart_at_the_end(np.array([_difference(pair, steps) for pair in rows]), LOSS_MARGIN, LIMITS["rise"])
    if apart is None:
        return None
    return LossCheck(outcome="different", difference=apart, steps=(steps[-_last_third(len(steps))], steps[-1]), paired=False)


def judge(pairs: Pairs, within: float) -> LossCheck:
    """Test whether candidates' losses are within a margin, a fraction, of references'; pairs of one seed count as their mean."""
    steps = sorted(set.intersection(*(set(curve) for several in pairs.values() for pair in several for curve in pair)))
    of_seeds = [np.array([_difference(pair, steps) for pair in several]) for several in pairs.values()]
    rows = np.array([several.mean(axis=0) for several in of_seeds])
    late = rows[:, len(steps) // 2 :]
    apart = None if np.isnan(rows).any() else _apart_at_the_end(np.concatenate(of_seeds), within)
    if np.isnan(rows).any():
        interval = NOT_A_NUMBER
    elif apart is not None:
        return LossCheck(outcome="different", difference=apart, steps=(steps[-_last_third(len(steps))], steps[-1]))
    elif len(rows) >= LIMITS["fewest_seeds"]:
        interval = statistics.mean_interval(late.mean(axis=1))
    else:
        interval = statistics.mean_interval(late.mean(axis=0), least_inflation=LIMITS["least_inflation"])
    low, high = (interval.low, interval.high) if interval.low is not None and interval.high is not None else (-np.inf, np.inf)
    ends = steps[len(steps) // 2], steps[-1]
    if low > within or high < -within:
        return LossCheck(outcome="different", difference=interval, steps=ends)
    if -within < low and high < within:
        return LossCheck(outcome="same", difference=interval, steps=ends)
    why = Finding(kind="too few steps for losses", numbers=(ends[1], within))
    return LossCheck(outcome="undecided", difference=interval, steps=ends, open_because=why)


def _last_third(count: int) -> int:
    return max(3, count // 3)


def _apart_at_the_end(rows: Array, within: float, of_one: float = LIMITS["one_pair"]) -> Interval | None:
    """Return the difference over the last third where it exceeds the margin beyond the noise of the first half.

    A late divergence inflates the variance of the steps that it is in, and of many pairs only one may diverge: so from three on
    each is tested, against the noise of all, and differs if it is as far off as `of_one`.
    `rows` are relative differences, shape (pairs, steps).
    """
    least = of_one if len(rows) >= LIMITS["fewest_seeds"] else 0.0
    tested, count = rows if least else rows.mean(axis=0, keepdims=True), rows.shape[1]
    early, late = count // 2, _last_third(count)
    if early < 3:
        return None
    places, first = np.arange(early), tested[:, :early]
    slopes, offsets = np.polyfit(places, first.T, 1)
    noise = first - offsets[:, None] - slopes[:, None] * places  # one side that falls behind is no noise
    inflation = max(float(np.mean([statistics.variance_inflation(row) for row in noise])), LIMITS["least_inflation"])
    freedom = max(statistics.FEWEST_FREEDOM, round(len(tested) * (early / inflation - 1)))
    error = math.sqrt(float((noise**2).sum()) / (len(tested) * (early - 2)) * inflation / late)
    arm = statistics.t_quantile(freedom, LIMITS["late_confidence"]) * error
    apart = [float(after) for after in tested[:, -late:].mean(axis=1) if abs(after) >= least and abs(after) - arm > within]
    return Interval(value=apart[0], low=apart[0] - arm, high=apart[0] + arm) if apart else None


def _difference(pair: tuple[LossCurve, LossCurve], steps: Sequence[int]) -> Array:
    reference, candidate = (np.array([curve[step] for step in steps]) for curve in pair)
    relative = np.full(len(steps), np.nan)
    np.divide(candidate, reference, out=relative, where=reference != 0)
    relative[(candidate == 0) & (reference == 0)] = 1
    return relative - 1


def curve_of(result: RunResult) -> LossCurve:
    """Return the losses of a run, not a number where a step's loss was none; steps whose loss is not recorded are left out."""
    known = [step for step in result.steps if step.loss is not None or not step.finite]
    return {step.step: float("nan") if step.loss is None else step.loss for step in known}


def pairs_of(references: Sequence[RunResult], candidates: Sequence[RunResult]) -> tuple[Pairs, Finding | None]:
    """Pair the runs of two sides by seed, repetitions in order; or say why the last two that were compared do not pair."""
    pairs: Pairs = {}
    left, why = list(candidates), None
    for reference in references:
        for candidate in left:
            why = mismatch(reference, candidate)
            if why is None:
                left.remove(candidate)
                curves = curve_of(reference), curve_of(candidate)
                if set(curves[0]) & set(curves[1]):
                    pairs.setdefault(reference.run.seed, []).append(curves)
                break
    return pairs, why


def mismatch(reference: RunResult, candidate: RunResult, *, unknown_alike: bool = False) -> Finding | None:
    """Return why the losses of two runs do not compare: seed, model, batch, data or learning rates.

    Unknown is not equal, unless neither side records it and `unknown_alike`.
    """
    one, other = reference.run, candidate.run
    tokens = [run.evidence.first_sequence if run.evidence else None for run in (one, other)]  # the first ones' fingerprint
    facts: list[tuple[str, object, object]] = [
        ("seed", one.seed, other.seed),
        *((TRAITS[key].name, TRAITS[key].value(one), TRAITS[key].value(other)) for key in ("model", "shape", "data")),
        ("tokens a step", tokens_per_step(one), tokens_per_step(other)),
        ("sequence length", one.ran.sequence_tokens, other.ran.sequence_tokens),
        ("first sequence", *(tokens if all(tokens) else ("", ""))),
    ]
    tolerance, rates = LIMITS["learning_rates"], {step.step: step.learning_rate for step in candidate.steps}
    for step in reference.steps:  # a schedule that follows the number of steps changes every loss
        name, first, second = f"learning rate of step {step.step}", step.learning_rate, rates.get(step.step)
        if step.step in rates and (first is None or second is None or abs(first - second) > tolerance * max(first, second)):
            facts.append((name, first, second))
    for field, *sides in facts:
        if sides[0] != sides[1] or (None in sides and not unknown_alike):
            words = tuple(
                "not recorded" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value) for value in sides
            )
            return Finding(kind="unlike losses", subjects=(field, *words))
    return None
