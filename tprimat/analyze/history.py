"""The rate of a configuration over time: where it changed, and what changed with it."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tprimat.analyze.groups import Measured
from tprimat.analyze.traits import TRAITS, model_and_shape, processors

OVER_TIME = ("power-limit", "driver", "processor", "environment", "software")
"""Traits that may change in the history of one configuration: they are what it is asked about."""
JOINT = " · "
LEAST_RUNS = 2
"""On each side of a change: one run alone may be an outlier."""
LEAST_NOISE = 0.002
"""Relative. Runs of one session often agree better than those of different days."""
LEAST_CHANGE = 0.01
"""Relative. Smaller changes may be real, but nobody acts on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run in a history."""

    path: str
    run_id: str
    started_at: str
    """ISO 8601; empty where the record has none."""
    configuration: str
    """The traits that make runs repetitions of each other, but OVER_TIME."""
    rate: float | None
    """Tokens/s of one GPU; None where the run has none."""
    not_counted: str | None = None
    """Why the run does not count."""
    facts: Mapping[str, str]
    """What may change over time: driver, power limit, hosts and their processors, versions, variables."""


def entry_of(item: Measured, path: str) -> Entry:
    """Return a measured run as an entry."""
    run, metrics = item.result.run, item.metrics
    rate = None if metrics is None or metrics.tokens_per_second_per_gpu is None else metrics.tokens_per_second_per_gpu.value
    machine = run.machine
    facts = {
        **run.software,
        **(run.environment or {}),
        "driver": machine.driver,
        "processor": processors(run),
        "hosts": ", ".join(node.host for node in run.nodes),
    }
    facts |= {"power limit": None if machine.power_limit_watts is None else f"{machine.power_limit_watts:.0f} W"}
    return Entry(
        path=path,
        run_id=run.run_id,
        started_at=run.started_at or "",
        configuration=JOINT.join(
            words
            for name, trait in TRAITS.items()
            if name not in OVER_TIME and (words := model_and_shape(run) if name == "model" else trait.label(run))
        ),
        rate=rate,
        not_counted=item.not_counted,
        facts={name: value for name, value in facts.items() if value},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change between two consecutive runs."""

    place: int
    """Number of the first run after it."""
    ratio: float
    """Rate after it over the rate before it, each the median up to the next change."""
    runs: tuple[int, int]
    """Behind each of the two medians."""
    facts: tuple[tuple[str, str, str], ...]
    """Name, value before and value after, of each fact that changed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A configuration over time."""

    configuration: str
    label: str
    """What tells it from the others."""
    entries: tuple[Entry, ...]
    """The runs that count, the oldest first."""
    changes: tuple[Change, ...]

    @property
    def unit(self) -> str:
        """Return the unit of its rates."""
        on_cpu = any(word.endswith((" process", " processes")) for word in self.configuration.split(JOINT))
        return "tokens/s/process" if on_cpu else "tokens/s/GPU"


def courses(entries: Sequence[Entry]) -> list[Course]:
    """Return each configuration with its changes, those with the newest runs first."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.started_at):
        if entry.not_counted is None and entry.rate is not None:
            found.setdefault(entry.configuration, []).append(entry)
    ordered = sorted(found.items(), key=lambda item: item[1][-1].started_at, reverse=True)
    names = labels([name for name, _ in ordered])
    return [
        Course(configuration=name, label=label, entries=tuple(runs), changes=changes_of(runs))
        for (name, runs), label in zip(ordered, names, strict=True)
    ]


ALWAYS_SHOWN = 8
"""Words of a configuration that its label has in any case: model, accelerator, ranks, strategy, layout, engine, dtype."""


def labels(configurations: Sequence[str]) -> list[str]:
    """Return the first words of each configuration, and of the others and their settings those that tell it from its likes."""
    parts = [configuration.split(JOINT) for configuration in configurations]
    found = []
    for mine in parts:
        likes = [other for other in parts if other[:ALWAYS_SHOWN] == mine[:ALWAYS_SHOWN] and other != mine]
        known = [{setting for word in other for setting in word.split(", ")} for other in likes]
        own = [
            ", ".join(setting for setting in word.split(", ") if any(setting not in settings for settings in known))
            for word in mine[ALWAYS_SHOWN:]
        ]
        found.append(JOINT.join([*mine[:ALWAYS_SHOWN], *filter(None, own)]))
    return found


def changes_of(runs: Sequence[Entry]) -> tuple[Change, ...]:
    """Return where the rate of some runs, the oldest first, changed."""
    rates = [entry.rate or math.nan for entry in runs]
    places = change_points(rates)
    edges = [0, *places, len(rates)]
    medians = [float(np.median(rates[low:high])) for low, high in itertools.pairwise(edges)]
    return tuple(
        Change(
            place=place,
            ratio=medians[number + 1] / medians[number],
            runs=(place - edges[number], edges[number + 2] - place),
            facts=changed_facts(runs[place - 1], runs[place]),
        )
        for number, place in enumerate(places)
    )


def changed_facts(before: Entry, after: Entry) -> tuple[tuple[str, str, str], ...]:
    """Return name, old and new value of each fact in which two runs differ."""
    names = dict.fromkeys([*before.facts, *after.facts])
    pairs = [(name, before.facts.get(name, "unknown"), after.facts.get(name, "unknown")) for name in names]
    return tuple(pair for pair in pairs if pair[1] != pair[2])


def change_points(rates: Sequence[float]) -> list[int]:
    """Return the places where the level of positive numbers changes: the first number of each new level.

    Binary segmentation of their logarithms: the split with the clearest difference of means is taken while it exceeds what noise
    gives. The noise comes from the differences of neighbours, which a change of level affects once only. A median of three
    removes single outliers, and leaves levels where they are.
    """
    values = np.log(np.asarray(rates, dtype=float))
    if len(values) < 2 * LEAST_RUNS:
        return []
    differences = np.diff(values)
    noise = max(LEAST_NOISE, 1.4826 * float(np.median(np.abs(differences))) / math.sqrt(2))
    # With few differences their median is a poor estimate, so that more is asked for.
    bound = THRESHOLD * (1 + SMALL_SAMPLE / len(differences))
    smooth = np.concatenate([values[:1], np.median([values[:-2], values[1:-1], values[2:]], axis=0), values[-1:]])
    return sorted(_splits(smooth, 0, len(smooth), noise, bound))


THRESHOLD, SMALL_SAMPLE = 3.3, 3.5
"""In standard errors: under 5 % of histories without a change show one (tests/analyze/test_changes.py simulates them)."""


def _splits(values: np.ndarray, low: int, high: int, noise: float, bound: float) -> list[int]:
    size = high - low
    if size < 2 * LEAST_RUNS:
        return []
    sums = np.cumsum(values[low:high])
    left = np.arange(LEAST_RUNS, size - LEAST_RUNS + 1)
    before = sums[left - 1] / left
    after = (sums[-1] - sums[left - 1]) / (size - left)
    clearness = np.abs(after - before) / (noise * np.sqrt(1 / left + 1 / (size - left)))
    best = int(np.argmax(clearness))
    if clearness[best] < bound or abs(after[best] - before[best]) < LEAST_CHANGE:
        return []
    middle = low + int(left[best])
    return [*_splits(values, low, middle, noise, bound), middle, *_splits(values, middle, high, noise, bound)]
