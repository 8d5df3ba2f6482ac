"""The content of each section of the page, as plain values that the templates lay out."""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tprimat.analyze.compare import Ranking
from tprimat.analyze.findings import findings
from tprimat.analyze.groups import Group, Measured, on_cpu
from tprimat.analyze.traits import accelerator_name, machine_name, on_nodes
from tprimat.core import units
from tprimat.records.evidence import facts, grade_of, other_notes
from tprimat.records.schema import RunRecord
from tprimat.report.catalogue import (
    CPU_CAUTION,
    FLOPS,
    MATMUL_SHARE,
    MFU,
    PEAK_MEMORY,
    RESERVED_MEMORY,
    STEP_TIME,
    TOKENS,
    heading_of,
    shown_columns,
)
from tprimat.report.comparison import Comparison, run_name
from tprimat.report.limits import distance_from_limits
from tprimat.report.names import heading
from tprimat.report.plots.style import Look
from tprimat.report.winner import VS_FASTEST, vs_fastest
from tprimat.report.words import differing, finding_words, headline

TILES = (TOKENS, FLOPS, MFU, MATMUL_SHARE, STEP_TIME, PEAK_MEMORY, RESERVED_MEMORY)
"""Figures on a workload's card."""

# The summary: one card per workload, with the fastest configuration, its lead, and its distance from the machine's limits.


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The summary of one workload."""

    workload: str
    headline: str
    tiles: Sequence[tuple[str, str]]
    """Heading and figure."""
    paragraphs: Sequence[str]


def cards(rankings: Sequence[Ranking]) -> list[Card]:
    """Return a card per workload; those with a single configuration come last."""
    return [_card(ranking) for ranking in sorted(rankings, key=lambda ranking: len(ranking.groups) == 1)]


def _card(ranking: Ranking) -> Card:
    best = ranking.best
    tiles = [(heading_of(metric, [best]), metric.text(best)) for metric in TILES if metric.fills(best)]
    first, *more = headline(ranking) if ranking.lead else [brief(best), *headline(ranking)]
    caution = CPU_CAUTION if on_cpu([best]) else ""
    paragraphs = [caution, *more, *differing(ranking), *distance_from_limits(best)]
    return Card(
        workload=heading(ranking),
        headline=first,
        tiles=tiles,
        paragraphs=[text for text in paragraphs if text],
    )


def brief(group: Group) -> str:
    """Return a group's label without its workload, for places that name the workload above."""
    return group.label.rpartition(": ")[2]


def said_once(cards: Sequence[Card]) -> tuple[list[Card], list[str]]:
    """Take the paragraphs that several cards share off them, and return them once."""
    times = Counter(text for card in cards for text in card.paragraphs)
    own = [replace(card, paragraphs=[text for text in card.paragraphs if times[text] == 1]) for card in cards]
    return own, [text for text, count in times.items() if count > 1]


# The head: what the runs ran on.


def hardware(runs: Sequence[RunRecord]) -> list[str]:
    """Return each kind of machine once: GPUs, their memory, power limit and driver."""
    found = []
    for run in runs:
        machine = run.machine
        more = [
            units.gibibytes(machine.memory_bytes) if machine.memory_bytes else "",
            f"{machine.power_limit_watts:.0f} W" if machine.power_limit_watts else "",
            f"driver {machine.driver}" if machine.driver else "",
        ]
        found.append(", ".join(filter(None, (machine_name(run) + on_nodes(run), *more))))
    return list(dict.fromkeys(found))


def software(runs: Sequence[RunRecord]) -> list[str]:
    """Return each package with its version, or with all of them where runs differ; without hashes of sources."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for name, version in run.software.items():
            versions.setdefault(name, []).append(version.split("+source")[0])
    return [f"{name} {' or '.join(dict.fromkeys(several))}" for name, several in sorted(versions.items())]


# The ranking: one row per configuration, one table body per workload, so that sorting never ranks unlike workloads.

TRAITS: dict[str, Callable[[RunRecord], str]] = {
    "model": lambda run: run.model,
    "accelerator": accelerator_name,
    "strategy": lambda run: run.strategy or "unknown",
    "engine": lambda run: run.engine,
}
"""By which rows can be filtered."""


Cell = tuple[str, str, float | None]
"""Heading, text and what it sorts by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration."""

    place: int
    """Among all groups of the page, as its data count them."""
    label: str
    look: Look
    traits: dict[str, str]
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingTable:
    """All rows, by workload, with what the controls above them need."""

    headings: Sequence[str]
    workloads: Sequence[tuple[str, Sequence[Row]]]
    choices: dict[str, list[str]]
    """Trait -> values, where there are several."""


def ranking_table(rankings: Sequence[Ranking], appearance: Sequence[Look]) -> RankingTable:
    """Return the table of all rankings; `appearance` has one look per group."""
    groups = [group for ranking in rankings for group in ranking.groups]
    metrics = shown_columns(groups)
    headings = {metric: heading_of(metric, groups) for metric in metrics}
    workloads: list[tuple[str, list[Row]]] = []
    place = 0
    for ranking in rankings:
        rows = []
        for position, group in enumerate(ranking.groups):
            cells = [
                _vs_fastest(ranking, position),
                *((headings[one], one.text(group), one.value(group)) for one in metrics),
            ]
            traits = {name: trait(group.run) for name, trait in TRAITS.items()}
            rows.append(Row(place=place, label=brief(group), look=appearance[place], traits=traits, cells=cells))
            place += 1
        workloads.append((heading(ranking), rows))
    values = {name: sorted({trait(group.run) for group in groups}) for name, trait in TRAITS.items()}
    return RankingTable(
        headings=["configuration", VS_FASTEST, *headings.values()],
        workloads=workloads,
        choices={name: several for name, several in values.items() if len(several) > 1},
    )


def _vs_fastest(ranking: Ranking, position: int) -> Cell:
    verdict = ranking.against_best[position]
    behind = None if verdict is None or verdict.ratio is None else verdict.ratio.value - 1
    text = vs_fastest(ranking, position) if len(ranking.groups) > 1 else units.ABSENT
    return VS_FASTEST, text, 0.0 if position == 0 and len(ranking.groups) > 1 else behind


# Evidence, failures and commands.


def warnings(comparison: Comparison, names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each warning with the short names of its runs: those of the comparison, then those of runs that do not count."""
    places = {finding_words(one): list(one.places) for one in findings(comparison.groups, run_name)}
    for item in comparison.not_counted:
        for mismatch in item.result.run.mismatches:
            places.setdefault(f"what ran is not what was asked: {mismatch}", []).append(run_name(item))
        for finding in item.metrics.warnings if item.metrics else ():
            places.setdefault(finding_words(finding), []).append(run_name(item))
    return {warning.rstrip("."): [names.get(place, place) for place in runs] for warning, runs in places.items()}


def evidence_fields(run: RunRecord) -> list[tuple[str, str]]:
    """Return what is known of a run in the words of its record, by grade: observed, resolved; then its notes."""
    if run.evidence is None:
        return []
    by_grade: dict[str, list[str]] = {}
    for name, value in facts(run.evidence).items():
        words = f"{name.replace('_', ' ')} {units.count(value) if type(value) is int else value}"
        by_grade.setdefault(grade_of(run, name) or "stated", []).append(words)
    if grade_of(run, "matmul_dtype") == "stated":
        by_grade.setdefault("stated", []).append(f"dtype {run.ran.matmul_dtype}")
    found = [(grade, "; ".join(by_grade[grade])) for grade in ("observed", "resolved", "stated") if grade in by_grade]
    notes = other_notes(run.evidence)
    return [*found, *([("note", "; ".join(notes).rstrip("."))] if notes else [])]


def failures(not_counted: Sequence[Measured], names: Mapping[str, str]) -> list[tuple[str, str, str, str, str | None]]:
    """Return short name, configuration, outcome, cause and hint of each run that does not count."""
    found = []
    for item in not_counted:
        run = item.result.run
        cause = item.not_counted if run.cause is None or run.outcome == "completed" else run.cause
        what = f"{run.model}, {run.strategy or 'strategy unknown'}, {run.engine}"
        outcome = run.outcome.replace("_", " ") + ("" if run.exit_code is None else f", exit {run.exit_code}")
        found.append((names[run_name(item)], what, outcome, cause or units.ABSENT, run.hint))
    return found


def commands(groups: Sequence[Group], not_counted: Sequence[Measured], names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the different command lines of every configuration; an empty list where none is recorded."""
    named = [(group.label, [item.result.run for item in group.runs]) for group in groups]
    named += [(f"{names[run_name(item)]} (not counted)", [item.result.run]) for item in not_counted]
    return {label: list(dict.fromkeys(shlex.join(run.command) for run in runs if run.command)) for label, runs in named}
