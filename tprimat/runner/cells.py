"""One list for every call that makes runs: an entry per configuration, planned or refused, with a cell for each of its runs."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tprimat.analyze.compare import QUESTION, Question, rankings
from tprimat.analyze.groups import Group, Measured, findings, group_runs, on_cpu
from tprimat.analyze.traits import model_name
from tprimat.core import units
from tprimat.core.errors import MissingLayoutError, UserError
from tprimat.plan.schema import RunPlan
from tprimat.records.benchmark_file import RunResult
from tprimat.records.environment import masked_environment
from tprimat.records.evidence import REDIRECTED, other_notes
from tprimat.records.schema import Finding
from tprimat.records.store import as_document
from tprimat.report.catalogue import MFU, TOKENS, per_rank
from tprimat.report.comparison import blocks
from tprimat.report.names import heading
from tprimat.report.tables import PLAIN, Screen, columns, with_interval
from tprimat.report.words import caveats, change
from tprimat.runner.request import BEST, RunRequest
from tprimat.runner.run import TrainingRun, renamed
from tprimat.runner.session import Session, prepare, shared_ranks

HEADER = ("model", "strategy", "layout", "outcome", "tokens/s/GPU")
DROP = ("folder", "strategy", "layout")
"""Columns in the order in which a narrow terminal loses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run to make."""

    session: Session
    plan: RunPlan
    label: str = ""
    """What tells it from others of its call, such as tp=2 micro_batch_size=4."""

    @property
    def name(self) -> str:
        """Model and strategy, and what tells it from others."""
        return f"{self.plan.model} {self.plan.strategy}" + (f" ({self.label})" if self.label else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What became of a cell."""

    cell: Cell
    run: TrainingRun | None = None
    reused: bool = False
    cause: str | None = None
    """Why nothing could be started, why the run failed, or whose run it is."""
    stop_signal: int | None = None

    @property
    def counts(self) -> bool:
        """Whether there is a run that an analysis may count."""
        return self.run is not None and self.run.record.counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEntry:
    """One model under one strategy."""

    label: str
    model: str
    strategy: str
    cells: tuple[Cell, ...] = ()
    """One for each repetition; none where it cannot run here."""
    refusal: UserError | None = None

    @property
    def left_out(self) -> bool:
        """Return whether the strategy has no layout for the model, which is not a failure."""
        return isinstance(self.refusal, MissingLayoutError)


def planned(requests: Iterable[tuple[str, RunRequest]]) -> list[PlannedEntry]:
    """Plan some requests, each with a label, as far as they can be planned here; on a CPU, all over equally many processes."""
    asked, entries = list(requests), []
    for label, request in asked:
        try:
            entries += entries_of(prepare(request), label)
        except UserError as error:
            entries.append(PlannedEntry(label=label, model=request.model, strategy=request.strategy or label, refusal=error))
    shared = shared_ranks(cell.plan for entry in entries for cell in entry.cells)
    if shared > asked[0][1].multiple and all(request.gpus is None for _, request in asked):
        return planned((label, replace(request, multiple=shared)) for label, request in asked)
    return entries


def entries_of(session: Session, label: str = "") -> list[PlannedEntry]:
    """Return an entry for each model and strategy of a session."""
    plans: dict[tuple[str, str], list[RunPlan]] = {}
    for plan in session.plans:
        plans.setdefault((plan.model, plan.strategy), []).append(plan)
    return [
        PlannedEntry(
            label=label,
            model=model,
            strategy=strategy,
            cells=tuple(Cell(session=session, plan=plan, label=label) for plan in same),
        )
        for (model, strategy), same in plans.items()
    ]


RUN_FIELDS = {"run_id", "run_directory", "output_directory", "engine_reason", "trainer", "command", "prediction"}
"""Fields of a plan that differ between two runs of the same configuration, and what older plans lack."""


def configuration(plan: RunPlan) -> str:
    """Return what two plans must share for their runs to be repetitions of each other, as JSON."""
    fields = {**asdict(plan), "environment": masked_environment(plan.environment)}  # as plan.json has it
    return json.dumps({key: value for key, value in fields.items() if key not in RUN_FIELDS}, sort_keys=True)


Twins = list[tuple[Cell, Cell]]
"""Cells that are the same run under another strategy's name: the later one and the first."""


def without_twins(entries: Iterable[PlannedEntry]) -> tuple[list[Cell], Twins]:
    """Return the cells to run, and those that an earlier strategy's run answers, because it splits the model alike."""
    firsts: dict[tuple[str, int], Cell] = {}
    twins: Twins = []
    for number, cell in (numbered for entry in entries for numbered in enumerate(entry.cells)):
        first = firsts.setdefault((configuration(replace(cell.plan, strategy="")), number), cell)
        if first is not cell:
            twins.append((cell, first))
    return list(firsts.values()), twins


def named_twice(results: Sequence[CellResult], twins: Twins) -> list[CellResult]:
    """Return a result for each twin: the first one's run under the later one's name, with its benchmark file in its folder."""
    by_id = {result.cell.plan.run_id: result for result in results}
    known = ((later, by_id[first.plan.run_id]) for later, first in twins if first.plan.run_id in by_id)
    return [
        replace(result, cell=later, run=result.run and renamed(result.run, later.plan.strategy, later.session.output))
        for later, result in known
    ]


def table(entries: Sequence[PlannedEntry], results: Sequence[CellResult], screen: Screen = PLAIN) -> str:
    """Return the table of all cells, one line a repetition, and the reasons below it, each once."""
    by_id = {result.cell.plan.run_id: result for result in results}
    rows = [row for entry in entries for row in _rows(entry, by_id)]
    platforms = {cell.plan.platform for entry in entries for cell in entry.cells}
    named = "configuration" if any("=" in entry.label for entry in entries) else "folder"  # --sweep has tp=2
    header = [named, *(per_rank(heading, platforms) for heading in HEADER)]
    lines = [columns(header, [row[:-1] for row in rows], left=len(header), screen=screen, drop=DROP)]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row[-1] != units.ABSENT:
            reasons.setdefault(row[-1], []).append(f"{row[1]} {row[2]}")
    lines += [screen.prose(f"{', '.join(names)}: {why}", 2) for why, names in reasons.items()]
    return "\n".join(lines)


def _rows(entry: PlannedEntry, by_id: Mapping[str, CellResult]) -> list[tuple[str, ...]]:
    head = (entry.label, entry.model, entry.strategy)
    if entry.refusal is not None:
        outcome = "left out" if entry.left_out else "cannot run here"
        return [(*head, units.ABSENT, outcome, units.ABSENT, entry.refusal.what)]
    return [(*head, *_outcome(cell, by_id.get(cell.plan.run_id))) for cell in entry.cells]


def _outcome(cell: Cell, result: CellResult | None) -> tuple[str, str, str, str]:
    layout = cell.plan.workload.layout_words()
    if result is None or result.run is None:
        cause = "the sweep was stopped" if result is None else result.cause or units.ABSENT
        return layout, "not started", units.ABSENT, cause
    record, metrics = result.run.record, result.run.metrics
    rate = with_interval(metrics.tokens_per_second_per_gpu if metrics else None, units.significant)
    why = record.cause or "; ".join(record.mismatches) or result.run.unmeasured or result.cause
    outcome = record.outcome.replace("_", " ") + (" earlier" if result.reused else "")
    return layout, outcome, rate, why or units.ABSENT


# The runs of one call summed up: repetitions into their mean, several configurations into a ranking.


def groups_of(runs: Sequence[TrainingRun]) -> list[Group]:
    """Return the configurations of some runs that have ended, without the runs that do not count."""
    counted = [run for run in runs if run.record.counts and run.metrics is not None]
    results = [RunResult(path=run.benchmark_file or run.log, run=run.record, steps=run.steps) for run in counted]
    return group_runs([Measured(result=one, metrics=run.metrics) for one, run in zip(results, counted, strict=True)])


def combined(groups: Sequence[Group], screen: Screen = PLAIN, question: Question | None = None) -> str:
    """Return the winner and the table of each workload of several configurations, and what to know; empty for a single run."""
    if sum(len(group.runs) for group in groups) < 2:
        return ""
    ranked = rankings(groups, question or QUESTION)
    noted = findings(groups, lambda item: f"{model_name(item.result.run)} {item.result.run.strategy}", _more)
    lines = [screen.prose(line, 2) for line in caveats(ranked, noted)]
    if several := [ranking for ranking in ranked if len(ranking.groups) > 1]:
        lines = ["\n\n".join(blocks([one], screen) for one in several), "", *lines]
    return "\n".join(lines)


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


def measured_lead(groups: Sequence[Group]) -> Iterator[str]:
    """Yield a sentence for each model for which a GPU ran another strategy faster than maximum_performance."""
    for ranking in rankings([group for group in groups if not on_cpu([group])]):
        for group, judged in zip(ranking.groups, ranking.against_best, strict=True):
            ratio = judged and judged.ratio
            if group.run.strategy == BEST and judged and ratio and judged.outcome in {"slower", "these runs differ"}:
                first = ranking.groups[0].run.strategy
                yield f"{BEST} is {change(ratio.value)} than {first} for {group.run.model} here."
