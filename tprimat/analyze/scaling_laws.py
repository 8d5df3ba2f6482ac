"""The laws of Amdahl and Gunther, fitted to a series of throughputs over GPUs."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tprimat.analyze.scaling import Series
from tprimat.analyze.statistics import Array, t_quantile
from tprimat.record.derived import Estimate

Law = Literal["Amdahl", "USL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A law of scaling, X(N) = single * N / (1 + contention * (N - 1) + coherency * N * (N - 1)), as the points suggest it.

    An interval's ends are None where there are no more points than parameters, or where the parameter sits at 0, its bound.
    """

    law: Law
    single: Estimate
    """Throughput of one GPU."""
    contention: Estimate
    """What GPUs wait for one another, or do not share: Amdahl's serial fraction."""
    coherency: Estimate | None
    """What every pair of GPUs costs; None in Amdahl's law."""
    deviation: float
    """Root mean square of the relative residuals."""

    def at(self, gpus: float) -> float:
        """Tokens/s that the law gives."""
        pairs = 0.0 if self.coherency is None else self.coherency.value * gpus * (gpus - 1)
        return self.single.value * gpus / (1 + self.contention.value * (gpus - 1) + pairs)

    @property
    def most_gpus(self) -> float | None:
        """Where throughput would be highest; None where the law has no such place."""
        if self.coherency is None or self.coherency.value <= 0 or self.contention.value >= 1:
            return None
        return math.sqrt((1 - self.contention.value) / self.coherency.value)


def fit(made: Series, law: Law) -> Fit | None:
    """Amdahl's law (1967) or Gunther's universal scalability law (2007, Guerrilla Capacity Planning, chapter 4).

    N / X is linear in (1, N - 1, N (N - 1)), so least squares of its relative residuals need no iteration. Parameters cannot be
    negative: one that would be is held at 0 and the others are fitted again. Intervals: Student's t on the residuals, carried
    to the ratios by the Jacobian.

    Returns:
        None where there are fewer points than parameters.
    """
    gpus = np.array([float(point.gpus) for point in made.points])
    inverse = gpus / np.array([point.tokens_per_second.value for point in made.points])
    terms = [np.ones_like(gpus), gpus - 1, gpus * (gpus - 1)][: 2 if law == "Amdahl" else 3]
    if len(gpus) < len(terms):
        return None
    design = np.stack(terms, axis=1) / inverse[:, None]
    free = _feasible(design)
    solution, covariance, deviation = _least_squares(design[:, free])
    first = float(solution[0])
    freedom = len(gpus) - len(free)
    single = _ratio(1.0, 1 / first, -1 / first**2 * np.eye(len(free))[0], covariance, freedom)
    parameters = []
    for column in range(1, len(terms)):
        if column not in free:
            parameters.append(Estimate(value=0.0, low=None, high=None, samples=len(gpus)))
            continue
        place = free.index(column)
        slope = np.zeros(len(free))
        slope[0], slope[place] = -solution[place] / first**2, 1 / first
        parameters.append(_ratio(float(solution[place]), 1 / first, slope, covariance, freedom))
    return Fit(
        law=law,
        single=single,
        contention=parameters[0],
        coherency=parameters[1] if law == "USL" else None,
        deviation=deviation,
    )


def _feasible(design: Array) -> list[int]:
    """Columns of the best fit whose coefficients are not negative; the first column, one GPU's time, is always among them."""
    rest = range(1, design.shape[1])
    choices = [[0, *(column for place, column in enumerate(rest) if mask >> place & 1)] for mask in range(1 << len(rest))]
    best: tuple[float, list[int]] | None = None
    for free in choices:
        solution, _, deviation = _least_squares(design[:, free])
        if (solution >= -1e-12 * abs(solution[0])).all() and (best is None or deviation < best[0] * (1 - 1e-9)):
            best = (deviation, free)
    return [0] if best is None else best[1]


def _least_squares(design: Array) -> tuple[Array, Array, float]:
    """Coefficients that bring every row's sum near 1, their covariance (0 without degrees of freedom), and the rms residual."""
    points, parameters = design.shape
    solution, *_ = np.linalg.lstsq(design, np.ones(points), rcond=None)
    residual = design @ solution - 1
    variance = float(residual @ residual) / max(1, points - parameters)
    covariance: Array = variance * np.linalg.pinv(design.T @ design)
    return np.asarray(solution, dtype=np.float64), covariance, math.sqrt(float(residual @ residual) / points)


def _ratio(numerator: float, inverse: float, slope: Array, covariance: Array, freedom: int) -> Estimate:
    value = numerator * inverse
    if freedom < 1:
        return Estimate(value=value, low=None, high=None, samples=freedom + len(slope))
    arm = t_quantile(freedom) * math.sqrt(float(slope @ covariance @ slope))
    return Estimate(value=value, low=value - arm, high=value + arm, samples=freedom + len(slope))
