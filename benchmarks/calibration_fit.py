"""Fit what steps take beyond their predictions, and gather the errors of sources that were left out: calibration.yaml.

Effects of traits are a ridge regression of log(measured / predicted): a source counts as the root of its rows, an outlier less
(Huber's weights), and an effect that few sources show stays near 0. Errors by kind are those of each row predicted by the effects
of all that neither its source nor another one measured of the same model on the same accelerator.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from tprimat.predict.calibration import shift_of

PENALTY = 0.5
"""Of the ridge, in rows."""
HUBER = 0.12
"""Errors beyond it count less."""
COVERED = 0.92
"""Share of rows of other sources that an interval is meant to hold."""
POOLED_ROWS = 10
"""Few rows of a kind say little of a new one: as many of its family, dense or experts, count with them."""
NARROWEST = 0.1
"""Half the width of an interval: sources of one kind share more than a new one will."""
RESERVED_BELOW, LEAST_MARGIN, FEWEST_RUNS = 0.98, 0.05, 20
"""Share of our runs that reserved less than the margin of their kind; the smallest margin; runs of a kind of its own."""
FEWEST_ROWS, FEWEST_SOURCES = 6, 2
"""Of a kind whose errors are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured step and its prediction."""

    name: str
    source: str
    subject: str
    """Model and accelerator: what another source may have measured, too."""
    accelerator: str
    traits: frozenset[str]
    kinds: tuple[str, ...]
    measured: float
    predicted: float

    @property
    def excess(self) -> float:
        """log(measured / predicted)."""
        return math.log(self.measured / self.predicted)


def effects_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the effect of each trait on the logarithm of a step."""
    names = sorted({trait for sample in samples for trait in sample.traits})
    rows = Counter(sample.source for sample in samples)
    traits = np.array([[float(name in sample.traits) for name in names] for sample in samples])
    excess = np.array([sample.excess for sample in samples])
    base = np.array([rows[sample.source] ** -0.5 for sample in samples])
    weights, effects = base, np.zeros(len(names))
    for _ in range(20):
        weighted = traits * weights[:, None]
        effects = np.linalg.solve(traits.T @ weighted + PENALTY * np.eye(len(names)), weighted.T @ excess)
        weights = base * np.minimum(1.0, HUBER / np.maximum(np.abs(excess - traits @ effects), 1e-9))
    return {name: round(float(effect), 4) for name, effect in zip(names, effects, strict=True)}


def left_out(samples: Sequence[Sample]) -> dict[str, float]:
    """Return log(measured / expected) of each sample, expected by the effects of other sources and other subjects."""
    errors: dict[str, float] = {}
    for source, subject in dict.fromkeys((sample.source, sample.subject) for sample in samples):
        effects = effects_of([sample for sample in samples if sample.source != source and sample.subject != subject])
        mine = [sample for sample in samples if (sample.source, sample.subject) == (source, subject)]
        errors |= {sample.name: sample.excess - shift_of(sample.traits, effects) for sample in mine}
    return errors


def spreads_of(samples: Sequence[Sample], errors: Mapping[str, float], without: str = "") -> dict[str, list[float]]:
    """Return by kind half the width of an interval, as a logarithm, and the rows behind it, without those of one source."""
    gathered = defaultdict(list)
    for sample in samples:
        for kind in sample.kinds if sample.source != without else ():
            gathered[kind].append((errors[sample.name], sample.source))
    widths = {
        kind: (_width([abs(error) for error, _ in pairs]), len(pairs), _independent(source for _, source in pairs))
        for kind, pairs in sorted(gathered.items())
        if kind == "all" or (len(pairs) >= FEWEST_ROWS and len({source for _, source in pairs}) >= FEWEST_SOURCES)
    }
    spreads = {}
    for kind, (width, rows, independent) in widths.items():
        wide, *_ = widths.get(kind.partition(",")[0], widths["all"])
        pooled = math.sqrt((independent * width**2 + POOLED_ROWS * wide**2) / (independent + POOLED_ROWS))
        spreads[kind] = [round(max(NARROWEST, width, pooled), 3), rows]
    return spreads


def _independent(sources: Iterable[str]) -> float:
    """Return as how many rows of different sources rows count: the root of each source's, as in the regression."""
    return sum(math.sqrt(rows) for rows in Counter(sources).values())


def _width(sizes: Sequence[float]) -> float:
    """Return what holds the covered share of such errors: at least that of their ranks, and of Student's t up to half as much."""
    t = stats.t.ppf((1 + COVERED) / 2, len(sizes) - 1)
    deviation = t * math.sqrt(sum(size**2 for size in sizes) / len(sizes) * (1 + 1 / len(sizes)))
    ranked = float(np.quantile(sizes, min(1.0, COVERED * (1 + 1 / len(sizes)))))
    return float(max(ranked, min(deviation, 1.5 * ranked)))


def fitted(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the content of one part of calibration.yaml."""
    return {"effects": effects_of(samples), "errors": spreads_of(samples, left_out(samples))}


def measured_on(samples: Sequence[Sample], kinds: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the accelerators that rows of each kind were measured on, most rows first."""
    return {kind: dict(Counter(sample.accelerator for sample in samples if kind in sample.kinds).most_common()) for kind in kinds}


def several_nodes(samples: Sequence[Sample], kinds: Iterable[str]) -> dict[str, int]:
    """Return how many rows of each kind ran on several nodes, of those that have some."""
    rows = {kind: sum(kind in sample.kinds and "nodes" in sample.traits for sample in samples) for kind in kinds}
    return {kind: count for kind, count in rows.items() if count}


def margins_of(reserved: Sequence[tuple[tuple[str, ...], float]]) -> dict[str, list[float]]:
    """Return by kind the margin of memory and the rows behind it, from the kinds of runs and reserved / predicted - 1 of each."""
    gathered = defaultdict(list)
    for kinds, excess in reserved:
        for kind in kinds:
            gathered[kind].append(excess)
    return {
        kind: [round(max(LEAST_MARGIN, float(np.quantile(excesses, RESERVED_BELOW))), 3), len(excesses)]
        for kind, excesses in sorted(gathered.items())
        if len(excesses) >= FEWEST_RUNS or ", " not in kind
    }


def text_of(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return calibration.yaml."""
    lines = [
        "# How steps differ from their predictions; written by python3 benchmarks/accuracy.py --calibrate, from",
        "# tprimat/data/published.yaml and benchmarks/records. Read by tprimat/predict/calibration.py.",
        "#",
        "# effects: trait -> what is added to the logarithm of a predicted step",
        "# margins: kind -> what was reserved beyond the predicted allocation, as a share, and the runs behind it",
        "# errors: kind -> half the width of the interval as a logarithm, and the rows of left-out sources behind it",
        "# measured_on: kind -> the accelerators of these rows, and how many each has",
        "# several_nodes: kind -> how many of these rows ran on several nodes, where some did",
    ]
    for name, part in parts.items():
        lines += ["", f"{name}:"]
        for key, values in part.items():
            rows = [f'    "{trait}": {json.dumps(value)}' for trait, value in values.items()]
            lines += [f"  {key}:", *rows] if rows else [f"  {key}: {{}}"]
    return "\n".join(lines) + "\n"
