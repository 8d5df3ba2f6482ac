"""How far predictions are from measurements: errors by group, and what one fitted factor for a machine, dtype and engine changes.

A factor is never fitted on what it is judged by: each configuration is predicted with the factor of the others in its group.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One configuration: what was measured, and what was predicted before looking."""

    name: str
    group: str
    """What errors are summed up over."""
    measured: float
    predicted: float
    fitted: float | None = None
    """Predicted times the factor of the group's other configurations; None: there are no others, or a factor makes no sense."""
    others: Mapping[str, float] | None = None
    """Other estimator -> its prediction."""
    layout: str = ""
    workload: str = ""
    """Rows of one workload differ in their layouts only."""
    rates: str | None = None
    """Where the rates of a step's prediction came from; None: unknown, or memory."""

    @property
    def error(self) -> float:
        """Relative, signed: 0.05 is predicted 5 % too high."""
        return self.predicted / self.measured - 1

    @property
    def fitted_error(self) -> float | None:
        """The same after the factor."""
        return None if self.fitted is None else self.fitted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of several rows."""

    rows: int
    mean_absolute: float
    worst: float
    """Signed."""
    bias: float
    """Mean of the signed errors."""
    within_5: float
    """Share of the rows."""
    within_8: float
    within_10: float


def errors(values: Iterable[float]) -> Errors | None:
    """Sum up relative errors; None where there are none."""
    found = list(values)
    if not found:
        return None
    sizes = [abs(value) for value in found]
    return Errors(
        rows=len(found),
        mean_absolute=fmean(sizes),
        worst=max(found, key=abs),
        bias=fmean(found),
        within_5=_share(sizes, 0.05),
        within_8=_share(sizes, 0.08),
        within_10=_share(sizes, 0.10),
    )


def _share(sizes: Sequence[float], limit: float) -> float:
    return sum(size <= limit for size in sizes) / len(sizes)


def factor(scores: Sequence[Score]) -> float | None:
    """Return the factor that best turns predictions into measurements: the geometric mean of their ratios."""
    if not scores:
        return None
    return math.exp(fmean(math.log(score.measured / score.predicted) for score in scores))


def with_factors(scores: Sequence[Score]) -> list[Score]:
    """Return the scores with each fitted by the factor of the other configurations of its group."""
    fitted = []
    for score in scores:
        scale = factor([other for other in scores if other.group == score.group and other.name != score.name])
        fitted.append(replace(score, fitted=None if scale is None else score.predicted * scale))
    return fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A workload that was measured in several layouts: which the predictions would have chosen."""

    workload: str
    chosen: Score
    best: Score
    layouts: int

    @property
    def loss(self) -> float:
        """How much longer the chosen layout's step takes than the best's, as a share."""
        return self.chosen.measured / self.best.measured - 1


def choices(scores: Sequence[Score], least: int = 3) -> list[Choice]:
    """Return the choice in each workload that was measured in at least so many layouts."""
    found = []
    for workload in dict.fromkeys(score.workload for score in scores):
        rows = [score for score in scores if score.workload == workload]
        if len(rows) >= least:
            chosen = min(rows, key=lambda score: score.predicted)
            best = min(rows, key=lambda score: score.measured)
            found.append(Choice(workload=workload, chosen=chosen, best=best, layouts=len(rows)))
    return found
