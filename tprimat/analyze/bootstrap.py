"""Resampling, for what has no closed form: the throughput of a group of runs. Each function cites its source."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tprimat.analyze.statistics import MOST_POINTS, Array, autocorrelation

MOST_DRAWS = 1_000_000
"""Resamples times runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The steady steps of one run."""

    tokens: Array
    """Shape (n,)."""
    seconds: Array
    """Shape (n,)."""

    @property
    def log_throughput(self) -> float:
        """Log of sum(tokens) / sum(seconds)."""
        return math.log(float(self.tokens.sum()) / float(self.seconds.sum()))


def block_length(values: Array) -> int:
    """Steps in a block of the block bootstrap: 1 without autocorrelation, else Carlstein's (1986) optimum for AR(1)."""
    rho = autocorrelation(values)
    length = (math.sqrt(6) * rho / (1 - rho**2)) ** (2 / 3) * len(values) ** (1 / 3)
    return int(min(max(1, round(length), -(-len(values) // MOST_POINTS)), max(1, len(values) // 4)))


def resampled_log_throughput(sample: Sample, resamples: int, rng: np.random.Generator) -> Array:
    """Log throughputs of one run with its steps drawn again in circular blocks (Politis and Romano 1992); shape (resamples,)."""
    n = len(sample.seconds)
    length = block_length(sample.seconds)
    starts = rng.integers(0, n, size=(resamples, n // length))
    sums = []
    for values in (sample.tokens, sample.seconds):
        running = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[: length - 1])))))
        sums.append((running[length:] - running[:-length])[starts].sum(axis=1))
    return np.asarray(np.log(sums[0]) - np.log(sums[1]))


def bootstrap_log_throughput(samples: Sequence[Sample], resamples: int, rng: np.random.Generator) -> Array:
    """Mean log throughput of a group of runs, drawn again: runs first, then steps in each.

    Plain two-stage resampling gets the variance wrong twice: steps count double, since the runs' own values already vary with
    theirs (Davison and Hinkley 1997, section 3.8), and k values drawn again vary (k - 1) / k of what they should (Hesterberg
    2015, doi:10.1080/00031305.2015.1089789). So the draws keep their shape and are scaled to the variance of a mean of k runs.

    Returns:
        Shape (resamples,), centred on the mean of the runs' own log throughputs; fewer for hundreds of runs, to bound memory.
    """
    resamples = min(resamples, max(200, MOST_DRAWS // len(samples)))
    observed = np.array([sample.log_throughput for sample in samples])
    within = np.stack([resampled_log_throughput(sample, resamples, rng) for sample in samples])
    runs, centre = len(samples), float(observed.mean())
    if runs == 1:
        steps = len(samples[0].seconds)
        return np.asarray(centre + (within[0] - centre) * math.sqrt(steps / max(1, steps - 1)))
    chosen = rng.integers(0, runs, size=(runs, resamples))
    draws = np.stack([within[row, rng.permutation(resamples)] for row in chosen]).mean(axis=0)
    spread = float(draws.std())
    wanted = float(observed.std(ddof=1)) / math.sqrt(runs)
    return np.asarray(centre + (draws - centre) * (wanted / spread if spread > 0 else 1.0))
