"""What steps take beyond their prediction, by what is alike in them, and how far other sources were off.

The figures are those of tprimat/data/calibration.yaml, which `python3 benchmarks/accuracy.py --calibrate` writes. A prediction is
multiplied by the exponential of the effects of its traits; an effect is shrunk towards 0 where few sources show it. The interval
is that of errors on sources that were left out.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from tprimat.core.accelerators import Accelerator
from tprimat.core.rows import DATA, document
from tprimat.core.workload import FullWorkload
from tprimat.predict.stages import busiest_rank

GENERATIONS = {"H": "hopper", "GH": "hopper", "B": "blackwell", "GB": "blackwell", "A": "ampere", "MI": "amd"}
"""Letters of an accelerator's name -> its generation."""
ASSUMED: Mapping[str, float] = document(DATA / "prediction.yaml")["intervals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A step as it is expected."""

    step_seconds: float
    low: float
    """Seconds that nine in ten steps of such a kind exceeded."""
    high: float
    kind: str
    """What the errors were gathered over."""
    rows: int
    """Of that kind."""
    spread: float
    """Half the width of the interval that held their errors, as a logarithm; [low, high] is wider where something is assumed."""
    measured_on: Mapping[str, int]
    """Accelerator -> how many of these rows were measured on it, most first."""
    farther: bool
    """It runs on several nodes, and none of these rows did."""

    def of(self, seconds: float, slow_host_seconds: float = 0.0) -> "Expected":
        """Return it for a step that takes so many times as long, and with a slow host so much longer."""
        high = max(seconds * self.high, slow_host_seconds * self.step_seconds)
        return replace(self, step_seconds=seconds * self.step_seconds, low=seconds * self.low, high=high)

    @property
    def widened(self) -> bool:
        """Whether the interval is wider than these errors, by assumption."""
        return math.log(self.step_seconds / self.low) > self.spread + 1e-9


def generation_of(accelerator: Accelerator) -> str:
    """Return the family of chips that an accelerator belongs to, or "other"."""
    letters = re.match(r"[A-Z]*", accelerator.name)
    return GENERATIONS.get(letters[0] if letters else "", "other")


def traits_of(work: FullWorkload, accelerator: Accelerator, gpus_per_node: int) -> frozenset[str]:
    """Return what errors are alike in."""
    code, generation = work.code, generation_of(accelerator)
    traits = {code.name, generation, accelerator.name}
    traits |= {f"{code.name}, experts", f"{generation}, experts", "experts"} if work.shape.experts else set()
    traits |= {f"{work.format}, experts"} if work.shape.experts and work.narrow else set()
    traits |= {"windows"} if work.shape.attention_window else set()
    traits |= {work.format, f"{generation}, {work.format}"} if work.narrow else set()
    traits |= {"sharded"} if code.shards_weights else set()
    traits |= {f"{code.name}, amd"} if generation == "amd" else set()
    traits |= {"nodes"} if work.world_size > max(gpus_per_node, accelerator.link_gpus) else set()
    return frozenset(traits)


def kinds_of(work: FullWorkload, accelerator: Accelerator) -> tuple[str, ...]:
    """Return the kinds of a step whose errors are gathered, narrowest first."""
    family, generation, code = "experts" if work.shape.experts else "dense", generation_of(accelerator), work.code.name
    apart = [] if generation in {"hopper", "blackwell"} else [f"{family}, {generation}"]
    sharded = [f"{family}, sharded"] if work.code.shards_weights else []
    return (*apart, f"{family}, {code}, {work.format}", f"{family}, {code}", *sharded, f"{family}, {work.format}", family, "all")


def expected(work: FullWorkload, accelerator: Accelerator, gpus_per_node: int, *, measured: bool = False) -> Expected:
    """Correct a step that is predicted to take a second, and give it an interval.

    `measured`: it was predicted from probes of the machine, which has errors of its own.
    """
    traits, kinds = traits_of(work, accelerator, gpus_per_node), kinds_of(work, accelerator)
    part = "probes" if measured else "published"
    factor, kind, unseen = _correction(traits, kinds, part)
    spread, rows = figures()[part]["errors"][kind]
    width = math.exp(spread * (1 + ASSUMED["unseen"] * len(unseen)) + ASSUMED["unsure_of_routing"] * math.log(busiest_rank(work)))
    return Expected(
        step_seconds=factor,
        low=factor / width,
        high=factor * width,
        kind=kind,
        rows=rows,
        spread=spread,
        measured_on=figures()["measured_on"][part][kind],
        farther="nodes" in unseen,
    )


@lru_cache
def _correction(traits: frozenset[str], kinds: tuple[str, ...], part: str) -> tuple[float, str, frozenset[str]]:
    """Return the factor of a step, the narrowest kind whose errors are known, and traits that no row has (nodes: of the kind)."""
    known = figures()[part]
    kind = next(kind for kind in kinds if kind in known["errors"])
    seen = known["effects"].keys() - ({"nodes"} if kind not in figures()["several_nodes"][part] else set())
    return math.exp(shift_of(traits, known["effects"])), kind, traits - seen


def memory_kinds_of(work: FullWorkload) -> tuple[str, ...]:
    """Return the kinds of a workload whose fragments are gathered, narrowest first."""
    family = "experts" if work.shape.experts else "sharded" if work.code.shards_weights else "dense"
    return f"{family}, {work.code.name}", family


def margin_of(work: FullWorkload) -> float:
    """Return the share by which what is reserved may exceed the prediction of what is allocated."""
    margins = figures()["memory"]["margins"]
    return float(next(margins[kind][0] for kind in memory_kinds_of(work) if kind in margins))


def shift_of(traits: frozenset[str], effects: Mapping[str, float]) -> float:
    """Return what traits add to the logarithm of a step."""
    return sum(effects.get(trait, 0.0) for trait in traits)


@cache
def figures() -> dict[str, Any]:
    """Return the content of calibration.yaml."""
    return document(DATA / "calibration.yaml")
