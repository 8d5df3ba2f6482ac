"""The matrix of models and strategies: plan every cell to say which are valid, or run them as run_all_configs.sh does."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tprimat.config.load import LoadedConfig, Setting, read_config
from tprimat.config.schema import Size
from tprimat.core import units
from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import MissingLayoutError, UserError
from tprimat.engines import FALLBACK
from tprimat.plan.build import PlanRequest
from tprimat.records.store import as_document
from tprimat.report.catalogue import per_rank
from tprimat.report.screen import PLAIN, Painted, Screen
from tprimat.report.tables import columns, wide, with_interval
from tprimat.runner.request import RunRequest
from tprimat.runner.session import plan_run, prepare
from tprimat.runner.sweep import Cell, CellResult, session_cells

# The matrix of run_all_configs.sh: one output folder a strategy.

STRATEGIES = ("maximum_performance", "truly_identical", "memory_optimized", "minimal_communication", "balanced")
"""In the order of output-00 to output-04. Other strategies run by ./benchmark.py --parallel."""
HEADER = ("folder", "model", "strategy", "layout", "outcome", "tokens/s/GPU", "why")
DROP = ("why", "folder", "layout")
"""Columns in the order in which a narrow terminal loses them; it lists the reasons below the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixEntry:
    """One model under one strategy."""

    folder: str
    model: str
    strategy: str
    cells: tuple[Cell, ...] = ()
    """One for each repetition; none where it cannot run here."""
    refusal: UserError | None = None

    @property
    def left_out(self) -> bool:
        """Return whether the strategy has no layout for the model, which is not a failure."""
        return isinstance(self.refusal, MissingLayoutError)

    def counts_in(self, results: Sequence[CellResult]) -> bool:
        """Return whether any of the results is a run of this entry that counts."""
        return any(result.counts and result.cell in self.cells for result in results)


def plan_matrix(request: RunRequest, models: Sequence[str]) -> list[MatrixEntry]:
    """Plan every entry as far as it can be planned, folder by folder."""
    return [
        plan_entry(dataclasses.replace(request, model=model, strategy=strategy, output=Path(f"output-{number:02d}")))
        for number, strategy in enumerate(STRATEGIES)
        for model in models
    ]


def plan_entry(request: RunRequest) -> MatrixEntry:
    """Plan one model under one strategy, or note why it cannot run."""
    folder, model, strategy = str(request.output), request.model, str(request.strategy)
    try:
        session = prepare(request)
    except UserError as error:
        return MatrixEntry(folder=folder, model=model, strategy=strategy, refusal=error)
    return MatrixEntry(folder=folder, model=model, strategy=strategy, cells=tuple(session_cells([session])))


def matrix_table(entries: Sequence[MatrixEntry], results: Sequence[CellResult], screen: Screen = PLAIN) -> str:
    """Return the table of all cells, one line a repetition, and on a terminal the reasons below it, each once."""
    by_id = {result.cell.plan.run_id: result for result in results}
    rows = [row for entry in entries for row in _rows(entry, by_id)]
    platforms = {cell.plan.platform for entry in entries for cell in entry.cells}
    header = [per_rank(heading, platforms) for heading in HEADER]
    if screen.width is None:
        return wide(header, rows, left=len(header))
    table = columns(header[:-1], [row[:-1] for row in rows], left=len(header) - 1, screen=screen, drop=DROP)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row[-1] != units.ABSENT:
            reasons.setdefault(row[-1], []).append(f"{row[1]} {row[2]}")
    return "\n".join([table, *(screen.prose(f"{', '.join(names)}: {why}", 2, "warning") for why, names in reasons.items())])


def matrix_document(entries: Sequence[MatrixEntry], results: Sequence[CellResult]) -> dict[str, Any]:
    """Return the same as data."""
    runs = {result.cell.plan.run_id: result.run for result in results if result.run is not None}
    return {
        "cells": [
            {
                "folder": entry.folder,
                "model": entry.model,
                "strategy": entry.strategy,
                "refused": None if entry.refusal is None else entry.refusal.what,
                "runs": [
                    {"run": as_document(run.record), "metrics": run.metrics and as_document(run.metrics)}
                    for cell in entry.cells
                    if (run := runs.get(cell.plan.run_id)) is not None
                ],
            }
            for entry in entries
        ]
    }


def _rows(entry: MatrixEntry, by_id: Mapping[str, CellResult]) -> list[tuple[str, ...]]:
    head = (entry.folder, entry.model, entry.strategy)
    if entry.refusal is not None:
        outcome = Painted("left out" if entry.left_out else "cannot run here", "quiet")
        return [(*head, units.ABSENT, outcome, units.ABSENT, entry.refusal.what)]
    return [(*head, *_outcome(cell, by_id.get(cell.plan.run_id))) for cell in entry.cells]


def _outcome(cell: Cell, result: CellResult | None) -> tuple[str, str, str, str]:
    """Return layout, outcome, throughput with its interval, and the cause of a failure."""
    degrees = cell.plan.workload.layout
    layout = f"TP{degrees.tensor} PP{degrees.pipeline} DP{degrees.data}"
    if result is None:
        return layout, Painted("not started", "warning"), units.ABSENT, "the sweep was stopped"
    if result.run is None:
        return layout, Painted("not started", "refused"), units.ABSENT, result.cause or units.ABSENT
    record, metrics = result.run.record, result.run.metrics
    rate = with_interval(metrics.tokens_per_second_per_gpu if metrics else None, units.significant)
    why = record.cause or "; ".join(record.mismatches) or result.run.unmeasured
    outcome = record.outcome.replace("_", " ") + (" earlier" if result.reused else "")
    return layout, outcome if result.counts else Painted(outcome, "refused"), rate, why or units.ABSENT


# Which cells of a configuration are valid, without running anything.

PLATFORM_ORDER: tuple[PlatformName, ...] = ("nvidia", "amd", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCell:
    """A model under a strategy on a platform."""

    model: str
    platform: PlatformName
    strategy: str
    description: str
    left_out: bool = False
    """The strategy has no layout for it."""
    error: UserError | None = None


def check_matrix(config: Path | None, gpus: int | None) -> Iterator[CheckedCell]:
    """Plan each cell of a configuration, by default TPrimat's own and with the number of GPUs that it states.

    `gpus` says how many GPUs a node has instead; on a CPU the processes stay those of the configuration.

    Raises:
        ConfigError: the file itself is wrong.
    """
    for platform in PLATFORM_ORDER:
        size: Size = "tiny" if platform == "cpu" else "full"
        settings = []
        if gpus and platform != "cpu":
            settings.append(Setting(("hardware", "platforms", platform, "gpus_per_node"), gpus, "--gpus"))
        loaded = read_config(config, size=size, settings=settings)
        if platform in loaded.config.hardware.platforms:
            for strategy in loaded.config.parallelism:
                for model in loaded.config.models:
                    yield _check(loaded, model, platform, strategy)


def _check(loaded: LoadedConfig, model: str, platform: PlatformName, strategy: str) -> CheckedCell:
    request = PlanRequest(
        model=model,
        strategy=strategy,
        platform=platform,
        size="tiny" if platform == "cpu" else "full",
        engine=FALLBACK,
        engine_reason="",
        gpus_found=None,
    )
    left_out, error = False, None
    try:
        plan = plan_run(loaded, request)
    except MissingLayoutError as missing:
        text, left_out = f"left out: {missing.what}", True
    except UserError as wrong:
        text, error = f"not valid: {wrong.what}", wrong
    else:
        layout, accumulation = plan.workload.layout, plan.workload.accumulation_steps
        experts = f" EP={layout.expert}" if layout.expert > 1 else ""
        degrees = f"TP={layout.tensor} PP={layout.pipeline} DP={layout.data}{experts} on {layout.world_size}"
        text = f"valid: {degrees}, GradAccum={accumulation}"
    return CheckedCell(model=model, platform=platform, strategy=strategy, description=text, left_out=left_out, error=error)
