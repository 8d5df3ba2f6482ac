"""Check whether two sides of a comparison of speeds reach the same losses: pairs of runs on one seed and data, or several seeds.

The quantity is the relative difference of the losses, candidate over reference - 1, as a mean over the later half of the steps
so far. It is looked at after FIRST_LOOK steps, twice as many, and so on to the end. Each look gets an equal share of the 5 %
of false alarms (Bonferroni), so that looking often costs confidence instead of creating findings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tprimat.analyze.traits import TRAITS, tokens_per_step
from tprimat.core import units
from tprimat.core.statistics import FALSE_ALARM, Array, Interval, Rate, mean_interval, ratio_of_rates
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import RunRecord

FIRST_LOOK = 8
"""Steps before the first look: four of them make its mean."""
FEWEST_SEEDS = 3
"""From this many on, the interval is that of the spread between seeds; with fewer, of the steps."""
LEAST_INFLATION = 5.0
"""Of the variance of a mean over steps: that of AR(1) noise of 2/3, since a short series cannot show how much its steps depend on
each other. False alarms then stay below 5 % up to AR(1) of 0.8 (tests/analyze/test_losses.py)."""
NOT_A_NUMBER = Interval(value=float("inf"), low=float("inf"), high=float("inf"))
"""The difference where a loss is not a number."""
RATE_TOLERANCE = 1e-6
"""Between the learning rates of a pair."""

Outcome = Literal["same", "different", "undecided"]
Curve = Mapping[int, float]
"""Step -> loss; not a number where the loss was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """Whether two sides of a comparison of speeds reach the same losses."""

    outcome: Outcome
    open_because: str = ""
    """Why this is undecided; empty where it is decided."""
    difference: Interval = NOT_A_NUMBER
    """Relative difference of the losses, candidate over reference - 1."""
    steps: tuple[int, int] = (0, 0)
    """First and last step that it averages."""
    seeds: int = 0
    paired: bool = True
    """Whether each run was compared with one of the same seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Why two runs are not a pair."""

    field: str
    reference: object
    candidate: object

    def __str__(self) -> str:
        if self.reference is None and self.candidate is None:
            return f"{self.field} is recorded on neither side"
        return f"{self.field} is {in_words(self.reference)} on one side and {in_words(self.candidate)} on the other"


OF_A_SEED = {"seed", "first sequence"}
"""Fields that follow the seed."""


def in_words(value: object) -> str:
    """Return a fact of a run as text."""
    return "not recorded" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def looks_until(steps: int) -> list[int]:
    """Return the numbers of steps after which the losses are looked at."""
    found = []
    place = FIRST_LOOK
    while place < steps:
        found.append(place)
        place *= 2
    return [*found, steps]


def judge(pairs: Mapping[object, Sequence[tuple[Curve, Curve]]], within: float) -> LossCheck:
    """Test whether the losses of candidates are within a margin, a fraction, of their references.

    `pairs` are the curves of reference and candidate by seed; several pairs of one seed count as their mean.
    """
    steps = sorted(set.intersection(*(set(curve) for several in pairs.values() for pair in several for curve in pair)))
    rows = np.array([np.mean([_difference(pair, steps) for pair in several], axis=0) for several in pairs.values()])
    places = looks_until(len(steps))
    confidence = 1 - FALSE_ALARM / len(places)
    for place in places:
        part = rows[:, place // 2 : place]
        interval = NOT_A_NUMBER if np.isnan(part).any() else _interval(part, confidence)
        if (outcome := _outcome(interval, within)) == "different":
            break
    first, last = steps[place // 2], steps[place - 1]
    reason = _open_because(outcome, last, within)
    return LossCheck(outcome=outcome, open_because=reason, difference=interval, steps=(first, last), seeds=len(pairs))


def _difference(pair: tuple[Curve, Curve], steps: Sequence[int]) -> Array:
    reference, candidate = (np.array([curve[step] for step in steps]) for curve in pair)
    relative = np.full(len(steps), np.nan)
    np.divide(candidate, reference, out=relative, where=reference != 0)
    relative[(candidate == 0) & (reference == 0)] = 1
    return relative - 1


def _interval(part: Array, confidence: float) -> Interval:
    """Return the mean difference of some steps, shape (seeds, steps): by seeds where there are enough, else by steps."""
    if len(part) >= FEWEST_SEEDS:
        return mean_interval(part.mean(axis=1), confidence)
    return mean_interval(part.mean(axis=0), confidence, LEAST_INFLATION)


def _outcome(interval: Interval, within: float) -> Outcome:
    if interval.low is None or interval.high is None:
        return "undecided"
    if interval.low > within or interval.high < -within:
        return "different"
    return "same" if -within < interval.low and interval.high < within else "undecided"


LOSS_MARGIN = 0.02
"""Difference of losses above which a gain in speed does not win."""
MOST_CHECKED = 8
"""Runs of a configuration whose losses are compared before their speeds."""


def check_losses(references: Sequence[RunResult], candidates: Sequence[RunResult]) -> LossCheck:
    """Compare the losses of two sides: pair by pair on equal seeds, else between sides with FEWEST_SEEDS seeds each.

    Engines draw other initial weights from one seed, so that runs of two engines are never pairs here.
    """
    one, other = references[:MOST_CHECKED], candidates[:MOST_CHECKED]
    same_engine = one[0].run.engine == other[0].run.engine
    pairs, why = pairs_of(one, other) if same_engine else ({}, [])
    if pairs:
        return judge(pairs, LOSS_MARGIN)
    if (apart := _curves_by_seed(one, other)) is not None:
        return judge_apart(*apart, LOSS_MARGIN)
    return LossCheck(outcome="undecided", open_because=f"losses were not compared: {_no_pair(one, other, why)}")


def _open_because(outcome: Outcome, steps: int, within: float) -> str:
    undecided = f"{steps} steps do not decide whether the losses are the same within {units.percent(within, 0)}"
    return undecided if outcome == "undecided" else ""


def _no_pair(references: Sequence[RunResult], candidates: Sequence[RunResult], why: Sequence["Mismatch"]) -> str:
    """Say why no losses of two sides compare."""
    silent = [not any(map(curve_of, side)) for side in (references, candidates)]
    if any(silent):
        return "neither side has any" if all(silent) else "one side has none"
    seeds = f"{FEWEST_SEEDS} seeds per side would do"
    if not why and references[0].run.engine != candidates[0].run.engine:
        shared = [one for one in mismatches_of_pair(references[0], candidates[0]) if one.field not in OF_A_SEED]
        return "; ".join(map(str, shared)) or f"two engines draw different initial weights from the same seed ({seeds})"
    if why and all(one.field in OF_A_SEED for one in why) and None not in (why[0].reference, why[0].candidate):
        return f"{why[0]} ({seeds})"
    return "; ".join(map(str, why)) or "they have no step in common"


def _curves_by_seed(
    references: Sequence[RunResult], candidates: Sequence[RunResult]
) -> tuple[list[list[Curve]], list[list[Curve]]] | None:
    """Return the curves of each side by seed; None where a side has fewer than FEWEST_SEEDS, or where more than seeds differ."""
    sides: list[list[list[Curve]]] = []
    for results in (references, candidates):
        seeds: dict[int, list[Curve]] = {}
        for result in results:
            alike = all(one.field in OF_A_SEED for one in mismatches_of_pair(references[0], result))
            if not alike or result.run.seed is None:
                return None
            seeds.setdefault(result.run.seed, []).append(curve_of(result))
        sides.append(list(seeds.values()))
    return None if min(map(len, sides)) < FEWEST_SEEDS else (sides[0], sides[1])


def judge_apart(references: Sequence[Sequence[Curve]], candidates: Sequence[Sequence[Curve]], within: float) -> LossCheck:
    """Test whether the mean losses of two sides with other seeds are within a margin, once, over the later half of all steps.

    Each side has its curves by seed; those of one seed count as their mean. The margin is a fraction.
    """
    curves = [curve for side in (references, candidates) for several in side for curve in several]
    steps = sorted(set.intersection(*map(set, curves)))
    late = steps[len(steps) // 2 :]
    sides = [[[curve[step] for curve in several for step in late] for several in side] for side in (references, candidates)]
    means = [[float(np.mean(losses)) if late else 0.0 for losses in side] for side in sides]
    usable = bool(late) and all(np.isfinite(mean) and mean > 0 for side in means for mean in side)
    interval = NOT_A_NUMBER
    if usable:
        one, other = ([Rate(log=float(np.log(mean)), error=None, freedom=0) for mean in side] for side in means)
        ratio = ratio_of_rates(one, other)
        value, low, high = (None if end is None else end - 1 for end in (ratio.value, ratio.low, ratio.high))
        interval = Interval(value=value or 0.0, low=low, high=high)
    outcome = _outcome(interval, within) if late else "undecided"
    ends = (late[0], late[-1]) if late else (0, 0)
    return LossCheck(
        outcome=outcome,
        open_because=_open_because(outcome, ends[1], within),
        difference=interval,
        steps=ends,
        seeds=min(len(references), len(candidates)),
        paired=False,
    )


# Which runs are pairs.


def curve_of(result: RunResult) -> Curve:
    """Return the losses of a run, not a number where a step's loss was none; steps whose loss is not recorded are left out."""
    nan = float("nan")
    return {
        step.step: nan if step.loss is None else step.loss for step in result.steps if step.loss is not None or not step.finite
    }


def mismatches_of_pair(reference: RunResult, candidate: RunResult) -> list[Mismatch]:
    """Return why the losses of two runs do not compare: seed, model, batch, data or learning rates. Unknown is not equal."""
    one, other = reference.run, candidate.run
    facts: list[tuple[str, object, object]] = [
        ("seed", one.seed, other.seed),
        *((TRAITS[key].name, TRAITS[key].value(one), TRAITS[key].value(other)) for key in ("model", "shape", "data")),
        ("tokens a step", tokens_per_step(one), tokens_per_step(other)),
        ("sequence length", one.ran.sequence_tokens, other.ran.sequence_tokens),
    ]
    found = [Mismatch(field=name, reference=first, candidate=second) for name, first, second in facts if not _same(first, second)]
    tokens = _first_sequence(one), _first_sequence(other)
    if None not in tokens and tokens[0] != tokens[1]:
        found.append(Mismatch(field="first sequence", reference=tokens[0], candidate=tokens[1]))
    return found + _unlike_rates(reference, candidate)


def _same(first: object, second: object) -> bool:
    return first is not None and first == second


def _first_sequence(run: RunRecord) -> str | None:
    return None if run.evidence is None else run.evidence.first_sequence


def _unlike_rates(reference: RunResult, candidate: RunResult) -> list[Mismatch]:
    """Return the first step of unlike learning rates: a schedule that follows the number of steps changes every loss."""
    rates = {step.step: step.learning_rate for step in candidate.steps}
    for step in reference.steps:
        one, other = step.learning_rate, rates.get(step.step)
        if step.step not in rates:
            continue
        if one is None or other is None or abs(one - other) > RATE_TOLERANCE * max(abs(one), abs(other)):
            return [Mismatch(field=f"learning rate of step {step.step}", reference=one, candidate=other)]
    return []


def pairs_of(
    references: Sequence[RunResult], candidates: Sequence[RunResult]
) -> tuple[dict[object, list[tuple[Curve, Curve]]], list[Mismatch]]:
    """Pair the runs of two sides by seed, repetitions in order.

    Returns:
        the pairs by seed; and of the most alike runs that are none, why.
    """
    pairs: dict[object, list[tuple[Curve, Curve]]] = {}
    nearest: list[Mismatch] | None = None
    left = list(candidates)
    for reference in references:
        for candidate in left:
            found = mismatches_of_pair(reference, candidate)
            if not found:
                pairs.setdefault(reference.run.seed, []).append((curve_of(reference), curve_of(candidate)))
                left.remove(candidate)
                break
            if nearest is None or len(found) < len(nearest):
                nearest = found
    usable = {seed: [pair for pair in several if set(pair[0]) & set(pair[1])] for seed, several in pairs.items()}
    return {seed: several for seed, several in usable.items() if several}, nearest or []
