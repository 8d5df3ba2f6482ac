"""Judge whether one group of runs is faster than another, or why the two must not be compared; rank those that may."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tprimat.analyze.groups import Group, group_estimate, group_held_back, same_runs
from tprimat.analyze.losses import LossCheck, check_losses
from tprimat.analyze.metrics import of_machine
from tprimat.analyze.traits import FORBIDDING, DifferingTrait, differing_traits, unrecorded
from tprimat.analyze.window import steady_steps
from tprimat.core import statistics
from tprimat.core.statistics import FEWEST_RUNS, Rate
from tprimat.records.schema import Estimate, Finding, RunRecord

Judgment = Literal[
    "faster", "slower", "other loss", "losses missing", "held back", "these runs differ", "no difference shown", "refused"
]


def comparable(first: RunRecord, second: RunRecord, varying: Collection[str] = ()) -> list[DifferingTrait]:
    """Return the differences between two workloads that forbid comparing their speeds, but for those that are the question."""
    return [trait for trait in differing_traits(first, second, varying, FORBIDDING) if trait.effect == "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a comparison is asked."""

    varying: tuple[str, ...] = ()
    """Traits that it is about, by their keys in groups.TRAITS: they may differ."""
    even_if_different: bool = False
    """Compare unlike workloads as well."""


QUESTION = Question()
"""Which of these is faster?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of comparing a candidate with a baseline."""

    baseline: str
    candidate: str
    outcome: Judgment
    """"these runs differ": the interval excludes 1, but one side has too few runs to show more than that. "other loss": it does,
    and the losses differ on the same data. "losses missing": it does, and only the slower side has losses of all its runs. "held
    back": it does, and its machine held back the slower side's clocks."""
    ratio: Estimate | None
    """Throughput of one GPU, candidate over baseline; None when refused."""
    runs: tuple[int, int]
    """Of baseline and candidate."""
    assumed_spread: float
    """Relative standard deviation that single runs are assumed to have."""
    traits: tuple[DifferingTrait, ...] = ()
    """Every trait in which the two differ: first is the baseline."""
    question: Question = QUESTION
    unrecorded: tuple[str, ...] = ()
    """Traits that neither side records."""
    losses: LossCheck | None = None
    """Whether the two sides reach the same losses; None when refused."""
    held_back: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})
    """Of baseline and candidate: what held the clocks back -> share of the readings in their worst run."""
    folders: tuple[str, str] = ("", "")
    """Of baseline and candidate, among several that a user named."""
    spreads: tuple[float, float] | None = None
    """Of baseline and candidate: standard deviation of a run's log throughput; None where one has a single run."""

    @property
    def differences(self) -> tuple[DifferingTrait, ...]:
        """Return the traits whose difference forbids the comparison."""
        return tuple(trait for trait in self.traits if trait.effect == "refuse")

    @property
    def other_loss(self) -> LossCheck | None:
        """Return what shows that the two sides reach different losses on the same data; None where nothing does."""
        return self.losses if self.losses is not None and self.losses.outcome == "different" else None

    @property
    def losses_open(self) -> Finding | None:
        """Return why it is not shown whether both sides reach the same losses; None where it is."""
        return None if self.losses is None else self.losses.open_because

    def no_slower_than(self, margin: float) -> bool | None:
        """Judge non-inferiority: True where the whole interval lies above 1 - margin, False where all lies below, else None."""
        if self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return None
        return True if self.ratio.low > 1 - margin else False if self.ratio.high < 1 - margin else None

    @property
    def handicapped(self) -> Literal["baseline", "candidate"] | None:
        """Return the side whose clocks the state of its machine held back more: heat, a power brake or lowered clocks."""
        one, other = (
            max((share for reason, share in side.items() if of_machine(reason, share)), default=0.0) for side in self.held_back
        )
        if one == other or max(one, other) < LEAST_HELD_BACK:
            return None
        return "baseline" if one > other else "candidate"


def verdict(baseline: Group, candidate: Group, question: Question = QUESTION) -> Verdict:
    """Compare two groups of runs by the throughput of one GPU.

    Runs are the unit: the interval is that of their spread. With a single run on a side it assumes how far runs differ
    (statistics.spread_between_runs). With fewer than statistics.FEWEST_RUNS the outcome speaks of these runs only.
    """
    assumed = assumed_spread(baseline, candidate)
    on_gpu = "cpu" not in {baseline.run.machine.platform, candidate.run.machine.platform}
    unread = on_gpu and group_held_back(baseline) is None and group_held_back(candidate) is None
    refusal = Verdict(
        baseline=baseline.label,
        candidate=candidate.label,
        outcome="refused",
        ratio=None,
        runs=(len(baseline.runs), len(candidate.runs)),
        assumed_spread=assumed,
        traits=tuple(differing_traits(baseline.run, candidate.run, question.varying)),
        question=question,
        unrecorded=(*unrecorded(baseline.run, candidate.run), *["whether clocks were held back"] * unread),
        held_back=(group_held_back(baseline) or {}, group_held_back(candidate) or {}),
        folders=(baseline.folder, candidate.folder),
    )
    if refusal.differences and not question.even_if_different:
        return refusal
    first, second = run_rates(baseline), run_rates(candidate)
    if not first or not second:
        return refusal
    ratio = statistics.ratio_of_rates(first, second, assumed=assumed)
    outcome: Judgment = "no difference shown"
    losses = check_losses(*([item.result for item in group.runs] for group in (baseline, candidate)))
    if ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high:
        shown: Judgment = "faster" if ratio.low > 1 else "slower"
        outcome = shown if min(len(first), len(second)) >= FEWEST_RUNS else "these runs differ"
        ahead, behind = ("candidate", "baseline") if shown == "faster" else ("baseline", "candidate")
        outcome = "held back" if refusal.handicapped == behind else outcome
        outcome = "losses missing" if losses.silent == ahead else outcome
        outcome = "other loss" if losses.outcome == "different" else outcome
    return replace(
        refusal,
        outcome=outcome,
        losses=losses,
        ratio=Estimate(value=ratio.value, low=ratio.low, high=ratio.high, samples=len(first) + len(second)),
        spreads=statistics.spreads_of(first, second),
    )


LEAST_HELD_BACK = 0.01
"""Share of the readings from which clocks that are held back belong to a verdict."""


def run_rates(group: Group) -> list[Rate]:
    """Return the throughput of each run, per GPU, so that a forced comparison across GPU counts compares single GPUs.

    Nothing where a run lacks tokens or GPUs.
    """
    rates = []
    for item in group.runs:
        gpus = item.result.run.machine.gpus
        if item.metrics is None or item.metrics.tokens_per_second is None or gpus is None:
            return []
        steps = steady_steps(item.result.steps, item.metrics.window)
        tokens = np.array([(step.tokens or 0) / gpus for step in steps])
        rates.append(statistics.rate_of(tokens, np.array([step.step_seconds for step in steps])))
    return rates


def assumed_spread(*groups: Group) -> float:
    """Return the relative standard deviation that single runs are assumed to have."""
    mixture = any(group.run.ran.shape is not None and group.run.ran.shape.experts for group in groups)
    least = statistics.BETWEEN_RUNS_OF_MIXTURES if mixture else statistics.BETWEEN_RUNS
    return statistics.spread_between_runs(*map(run_rates, groups), least=least)


# The ranking of configurations that may be compared, and the verdicts that a comparison shows.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The configurations of one workload. Speeds of different rankings are never compared."""

    groups: tuple[Group, ...]
    """Fastest first, those without a throughput last."""
    against_best: tuple[Verdict | None, ...]
    """For each group the verdict on it against the first; None for the first itself and for another name of its runs."""
    lead: Verdict | None
    """The verdict on the first against the second; None without a second that has a throughput."""
    second: Group | None
    """The next with runs of its own."""
    question: Question = QUESTION

    @property
    def best(self) -> Group:
        """Return the group with the highest throughput of one GPU."""
        return self.groups[0]

    @property
    def tied(self) -> tuple[Group, ...]:
        """Return the other groups that are not shown to be slower than the best."""
        paired = zip(self.groups, self.against_best, strict=True)
        return tuple(group for group, against in paired if against is not None and against.outcome == "no difference shown")


def throughput(group: Group) -> Estimate | None:
    """Return the tokens/s of one GPU."""
    return group_estimate(group, lambda metrics: metrics.tokens_per_second_per_gpu)


def rankings(groups: Sequence[Group], question: Question = QUESTION) -> list[Ranking]:
    """Return every group in one ranking, rankings in order of first appearance."""
    fields: list[list[Group]] = []
    for group in groups:
        known = next((field for field in fields if not comparable(field[0].run, group.run, question.varying)), None)
        if known is None:
            fields.append([group])
        else:
            known.append(group)
    return [_ranking(field, question) for field in fields]


def _ranking(field: Sequence[Group], question: Question) -> Ranking:
    ranked = sorted(field, key=slowness)
    best, alike = ranked[0], replace(question, even_if_different=False)
    of_best = [throughput(best) is None or same_runs(best, group) for group in ranked]
    judged = tuple(None if same else verdict(best, group, alike) for group, same in zip(ranked, of_best, strict=True))
    second = next((group for group, one in zip(ranked, judged, strict=True) if one is not None and one.ratio is not None), None)
    lead = None if second is None else verdict(second, best, alike)
    return Ranking(groups=tuple(ranked), against_best=judged, lead=lead, second=second, question=question)


def slowness(group: Group) -> float:
    """Return what sorts groups, the fastest first and those without a throughput last."""
    rate = throughput(group)
    return float("inf") if rate is None else -rate.value


def most_alike(leaders: Sequence[Group], group: Group) -> Group:
    """Return the leader most like a group: by workload, then by configuration; the first of equals. Needs one leader at least."""

    def distance(leader: Group) -> tuple[int, int]:
        unlike = sum(one != other for one, other in zip(leader.kind[1:], group.kind[1:], strict=True))
        return len(comparable(leader.run, group.run)), unlike

    return min(leaders, key=distance)


def verdicts_of(ranked: Sequence[Ranking], question: Question = QUESTION) -> list[Verdict]:
    """Return the verdict on each group against the fastest of its workload, and on each workload's fastest against another's.

    That one is of the same model, or of any where unlike ones are compared, and the most alike of those before it.
    """
    verdicts: list[Verdict] = []
    for place, ranking in enumerate(ranked):
        run = ranking.best.run
        alike = [
            one.best
            for one in ranked[:place]
            if question.even_if_different or (one.best.run.model, one.best.run.size) == (run.model, run.size)
        ]
        verdicts += [verdict(most_alike(alike, ranking.best), ranking.best, question)] if alike else []
        verdicts += [one for one in ranking.against_best if one is not None]
    return verdicts
