"""The content of each section of the page, as plain values that the templates lay out."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tprimat.analyze.groups import Group, Measured, findings, on_cpu
from tprimat.analyze.traits import machine_name, on_nodes
from tprimat.core import units
from tprimat.records.evidence import facts, grade_of, other_notes
from tprimat.records.schema import RunRecord
from tprimat.report import catalogue
from tprimat.report.comparison import VS_FASTEST, cells
from tprimat.report.names import RankedWorkload, heading
from tprimat.report.plots import MOST_SERIES, BarPanel, Look
from tprimat.report.plots.comparison import MOST_CURVES, MOST_GROUPS, Curve, curves_of, memory_panel, throughput_panel
from tprimat.report.words import differing, finding_words, headline, not_counted_words, run_name

TILES = (
    *(catalogue.TOKENS, catalogue.FLOPS, catalogue.MFU, catalogue.MATMUL_SHARE, catalogue.STEP_TIME),
    *(catalogue.PEAK_MEMORY, catalogue.RESERVED_MEMORY),
)
"""Figures on a workload's card."""

# The summary: one card per workload, with the fastest configuration and its lead.


Values = dict[str, Any]
"""What a template lays out, by name."""


def cards(works: Sequence[RankedWorkload]) -> tuple[list[Values], list[str]]:
    """Return a card per workload, and the paragraphs that several share, each once."""
    cards = [_card(work) for work in works]
    times = Counter(text for card in cards for text in card["paragraphs"])
    for card in cards:
        card["paragraphs"] = [text for text in card["paragraphs"] if times[text] == 1]
    return cards, [text for text, count in times.items() if count > 1]


def _card(work: RankedWorkload) -> Values:
    ranking, best = work.ranking, work.ranking.best
    first, *more = headline(ranking) or [work.configurations[0].label]
    return {
        "workload": heading(ranking),
        "headline": first,
        "tiles": [(catalogue.heading_of(metric, [best]), metric.text(best)) for metric in TILES if metric.fills(best)],
        "paragraphs": [*[catalogue.CPU_CAUTION] * on_cpu([best]), *more, *differing(ranking)],
    }


# The head: what the runs ran on.


def hardware(runs: Sequence[RunRecord]) -> list[str]:
    """Return each kind of machine once: GPUs, their memory, power limit and driver."""
    machines = [
        (
            machine_name(run) + on_nodes(run),
            units.gibibytes(run.machine.memory_bytes) if run.machine.memory_bytes else "",
            f"{run.machine.power_limit_watts:.0f} W" if run.machine.power_limit_watts else "",
            f"driver {run.machine.driver}" if run.machine.driver else "",
        )
        for run in runs
    ]
    return [", ".join(filter(None, words)) for words in dict.fromkeys(machines)]


def software(runs: Sequence[RunRecord]) -> list[str]:
    """Return each package with its version, or with all of them where runs differ; without hashes of sources."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for name, version in run.software.items():
            versions.setdefault(name, []).append(version.split("+source")[0])
    return [f"{name} {' or '.join(dict.fromkeys(several))}" for name, several in sorted(versions.items())]


# The ranking: one row per configuration, one table body per workload, so that sorting never ranks unlike workloads.


def ranking_table(works: Sequence[RankedWorkload], appearance: Sequence[Look]) -> Values:
    """Return all rows by workload; `appearance` has one look per group.

    A row's place is that of its group among all of the page, as its data count them.
    """
    groups = [one.group for work in works for one in work.configurations]
    metrics, looks = catalogue.shown_columns(groups), enumerate(appearance)
    workloads: list[tuple[str, list[Values]]] = []
    for work in works:
        rows = []
        for one, row in zip(work.configurations, cells(work.ranking, metrics), strict=True):
            place, look = next(looks)
            rows.append({"place": place, "label": one.label, "look": look, "cells": row})
        workloads.append((heading(work.ranking), rows))
    headings = ["configuration", VS_FASTEST, *(catalogue.heading_of(metric, groups) for metric in metrics)]
    return {"headings": headings, "workloads": workloads}


# Evidence, failures and commands.


def warnings(groups: Sequence[Group], not_counted: Sequence[Measured], names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each warning with the short names of its runs: those that count, then those that do not."""
    places = {finding_words(one): list(one.places) for one in findings(groups, run_name)}
    for item in not_counted:
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
    by_grade["note"] = [note.rstrip(".") for note in other_notes(run.evidence)]
    return [(name, "; ".join(by_grade[name])) for name in ("observed", "resolved", "stated", "note") if by_grade.get(name)]


def failures(not_counted: Sequence[Measured], names: Mapping[str, str]) -> list[tuple[str, str, str, str, str | None]]:
    """Return short name, configuration, outcome, cause and hint of each run that does not count."""
    rows = []
    for item in not_counted:
        run = item.result.run
        cause = not_counted_words(item) if run.cause is None or run.outcome == "completed" else run.cause
        what = f"{run.model}, {run.strategy or 'strategy unknown'}, {run.engine}"
        outcome = run.outcome.replace("_", " ") + ("" if run.exit_code is None else f", exit {run.exit_code}")
        rows.append((names[run_name(item)], what, outcome, cause or units.ABSENT, run.hint))
    return rows


def commands(works: Sequence[RankedWorkload], not_counted: Sequence[Measured], names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the command lines of every configuration, one of those that differ in the folder only; empty if none is recorded."""
    every = [(one, work) for work in works for one in work.configurations]
    named = [(one.label_among(work), [item.result.run for item in one.group.runs]) for one, work in every]
    named += [(f"{names[run_name(item)]} (not counted)", [item.result.run]) for item in not_counted]
    typed = {label: [[word for word in run.command if word != "--json"] for run in runs if run.command] for label, runs in named}
    lines = {label: [shlex.join(words) for words in commands] for label, commands in typed.items()}
    folder = r" --output-dir ('[^']*'|\S+)"
    return {label: list({re.sub(folder, "", line): line for line in some}.values()) for label, some in lines.items()}


def shown_panels(groups: Sequence[Group]) -> tuple[list[BarPanel], list[Curve]]:
    """Return the panels for which a run that counts has a value."""
    runs = [item.result for group in groups for item in group.runs]
    bars = [panel(groups) for panel in (throughput_panel, memory_panel)] if groups else []
    curves = [curve for curve in curves_of(groups) if any(curve.value(step) is not None for run in runs for step in run.steps)]
    return [panel for panel in bars if any(row.value is not None for row in panel.rows)], curves


def page_data(works: Sequence[RankedWorkload], runs: Sequence[Measured], appearance: Sequence[Look]) -> dict[str, Any]:
    """Return the data as plain lists and dictionaries; absent values are None.

    Rows of the ranking refer to groups by their place here; each group has a look.
    """
    every = [(place, work, one) for place, work in enumerate(works) for one in work.configurations]
    bars, curves = shown_panels([one.group for _, _, one in every])
    names = short_names(runs)
    return {
        "groups": [
            {
                "label": one.label_among(work),
                "title": work.title,
                "name": one.label,
                "work": place,
                **asdict(look),
                "runs": [_series(item, curves, names) for item in one.group.runs[:MOST_CURVES]],
            }
            for (place, work, one), look in zip(every, appearance, strict=True)
        ],
        "bars": list(map(_bars, bars)),
        "curves": [{"title": one.title, "unit": one.unit, "steady": one.steady, "span": one.least_span} for one in curves],
        "most": MOST_SERIES,
        "mostBars": MOST_GROUPS,
    }


def short_names(runs: Sequence[Measured]) -> dict[str, str]:
    """Return a short name by the whole one, which stays where two would be equal.

    It is the id without the moment of its start, or the folders that tell files apart.
    """
    files = [item.result.path.parts for item in runs if item.result.path.is_file()]
    common = next((place for place, parts in enumerate(zip(*files, strict=False)) if len(set(parts)) > 1), -2)
    short = {}
    for item in runs:
        path, run_id = item.result.path, item.result.run.run_id
        folders = "/".join(path.parts[common:-1]) or path.name
        short[run_name(item)] = folders if path.is_file() else re.sub(r"^\d{8}-\d{6}-\d+-", "", run_id)
    times = Counter(short.values())
    return {whole: brief if times[brief] == 1 else whole for whole, brief in short.items()}


def _series(item: Measured, curves: Sequence[Curve], names: Mapping[str, str]) -> dict[str, Any]:
    steps = item.result.steps
    columns = [[curve.value(step) for step in steps] for curve in curves]
    numbers = [step.step for step in steps]
    rising = numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    return {
        "name": names[run_name(item)],
        "first": None if item.metrics is None else item.metrics.window.first_step,
        "steps": (numbers[:1] or [1])[0] if rising else numbers,
        "curves": [list(map(_short, values)) if {*values} != {None} else [] for values in columns],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")  # no screen shows more


def _bars(panel: BarPanel) -> dict[str, Any]:
    keys = ("value", "low", "high")
    return {
        "title": panel.title,
        "axis": panel.axis,
        "rows": [{**{key: _short(getattr(row, key)) for key in keys}, "text": row.text} for row in panel.rows],
    }
