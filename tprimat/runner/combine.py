"""Sum up the runs of one call: repetitions into their mean, several configurations into a ranking."""

from collections.abc import Sequence
from typing import Any

from tprimat.analyze.compare import QUESTION, Question, rankings
from tprimat.analyze.groups import Group, Measured, findings, group_runs
from tprimat.analyze.traits import model_name
from tprimat.records.benchmark_file import RunResult
from tprimat.records.evidence import REDIRECTED, other_notes
from tprimat.records.schema import Finding
from tprimat.records.store import as_document
from tprimat.report.catalogue import MFU, TOKENS
from tprimat.report.comparison import blocks
from tprimat.report.names import heading
from tprimat.report.tables import PLAIN, Screen
from tprimat.report.words import caveats
from tprimat.runner.run import TrainingRun


def groups_of(runs: Sequence[TrainingRun]) -> list[Group]:
    """Return the configurations of some runs that have ended, without the runs that do not count."""
    return group_runs([_measured(run) for run in runs if run.record.counts and run.metrics is not None])


def _measured(run: TrainingRun) -> Measured:
    path = run.log if run.benchmark_file is None else run.benchmark_file
    return Measured(result=RunResult(path=path, run=run.record, steps=run.steps), metrics=run.metrics)


def combined(runs: Sequence[TrainingRun], screen: Screen = PLAIN, question: Question | None = None) -> str:
    """Return the winner and the table of each workload of several runs, and what to know; empty where at most one run counts.

    A workload that ran once has no table, which would repeat what the summary of its run says.
    """
    groups, question = groups_of(runs), question or QUESTION
    if sum(len(group.runs) for group in groups) < 2:
        return ""
    ranked = rankings(groups, question)
    lines = [screen.prose(line, 2, "quiet") for line in caveats(ranked, findings(groups, _name, _more))]
    repeated = [ranking for ranking in ranked if sum(len(group.runs) for group in ranking.groups) > 1]
    if repeated:
        lines = [blocks(repeated, screen, say_apart=False), "", *lines]
    return "\n".join(lines)


def _name(item: Measured) -> str:
    return f"{model_name(item.result.run)} {item.result.run.strategy}"


def _more(item: Measured) -> list[Finding]:
    """Return what the evidence of a run notes, but for what the caution about CPUs says."""
    notes = other_notes(item.result.run.evidence)
    return [Finding(kind="caution", subjects=(note,)) for note in notes if note != REDIRECTED]


def combined_document(runs: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """Return each configuration, fastest first within its workload: label, number of runs, mean and interval."""
    return [
        {
            "configuration": group.label,
            "workload": heading(ranking),
            "runs": len(group.runs),
            **{metric.key: as_document(estimate) if (estimate := metric.of_group(group)) else None for metric in (TOKENS, MFU)},
        }
        for ranking in rankings(groups_of(runs))
        for group in ranking.groups
    ]
