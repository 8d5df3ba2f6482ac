"""Run each of the five strategies of config.yaml into a folder of its own, then compare them.

./run_all_configs.sh                      both models: output-00 to output-04, all_outputs/compare-00.png to compare-04.png
./run_all_configs.sh llama --steps 3      flags of ./benchmark.py are passed on
./run_all_configs.sh qwen --fresh         also what an earlier call has completed
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli import options as flags
from tprimat.cli.console import outlasting
from tprimat.errors import ConfigError, UserError

if TYPE_CHECKING:
    from tprimat.runner.sweep import Cell, Done

STRATEGIES = ("maximum_performance", "truly_identical", "memory_optimized", "minimal_communication", "balanced")
"""In the order of output-00 to output-04. Strategies that a user adds run by ./benchmark.py --parallel."""
MODELS = {"llama": ("llama",), "qwen": ("qwen",), "both": ("llama", "qwen")}
DECIDED_HERE = {"model": "all", "parallel": None, "output_dir": None, "probe": None, "dry_run": False, "scaling": None}
"""Flags of ./benchmark.py that this command sets itself, and their defaults there."""
PICTURES = Path("all_outputs")
HEADER = ("folder", "model", "strategy", "layout", "outcome", "tokens/s/GPU", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One model under one strategy."""

    folder: str
    model: str
    strategy: str
    cells: tuple["Cell", ...] = ()
    """Repetitions; none: it cannot run here."""
    refusal: UserError | None = None


def parser() -> argparse.ArgumentParser:
    """The command line: that of ./benchmark.py, and ours."""
    made = flags.parser()
    made.prog, made.description, made.epilog = "run_all_configs.sh", __doc__, None
    made.add_argument("models", nargs="?", choices=tuple(MODELS), default="both", help="default: both")
    made.add_argument("--fresh", action="store_true", help="run also what an earlier call has completed")
    return made


def places(options: argparse.Namespace) -> list[Place]:
    """Every cell, folder by folder, planned as far as it can be.

    Raises:
        ConfigError: a flag that this command decides.
    """
    for name, default in DECIDED_HERE.items():
        if getattr(options, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is not for this command.", where=flag, fix="./benchmark.py takes it")
    return [
        place(options, f"output-{number:02d}", model, strategy)
        for number, strategy in enumerate(STRATEGIES)
        for model in MODELS[options.models]
    ]


def place(options: argparse.Namespace, folder: str, model: str, strategy: str) -> Place:
    """One model under one strategy, or why it cannot run."""
    from tprimat.runner.session import prepare
    from tprimat.runner.sweep import Cell

    asked = argparse.Namespace(**{**vars(options), "model": model, "parallel": strategy, "output_dir": folder})
    try:
        session = prepare(asked)
    except UserError as error:
        return Place(folder=folder, model=model, strategy=strategy, refusal=error)
    command = ("./run_all_configs.sh", *sys.argv[1:])
    cells = tuple(Cell(session=session, plan=replace(plan, command=command)) for plan in session.plans)
    return Place(folder=folder, model=model, strategy=strategy, cells=cells)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 when every cell has a run that counts, else 1."""
    from tprimat.engines.worker import require_worker_modules
    from tprimat.runner.sweep import carry_out

    planned = places(options)
    cells = [cell for one in planned for cell in one.cells]
    if not cells:
        raise next(one.refusal for one in planned if one.refusal is not None)
    if cells[0].plan.engine in {"megatron", "nemo"}:
        require_worker_modules()
    done = carry_out(cells, quiet=options.quiet, resume=not options.fresh, messages=sys.stderr)
    compared = compare([one.folder for one in planned if any(has_result(one, cell) for cell in done)], options.probes)
    show(planned, done, options)
    complete = len(done) == len(cells) and all(cell.counts for cell in done) and not any(one.refusal for one in planned)
    return 0 if complete and compared else 1


def has_result(one: Place, done: "Done") -> bool:
    """Whether a finished cell stands in this place and counts."""
    return done.counts and done.cell in one.cells


def compare(folders: Sequence[str], probes: Sequence[Path]) -> bool:
    """The picture of each folder; what is compared in words goes to stderr, as progress does."""
    from tprimat.cli.compare_all import pictures

    with contextlib.redirect_stdout(sys.stderr):
        return pictures([Path(folder) for folder in dict.fromkeys(folders)], PICTURES, probes) == 0


def show(planned: Sequence[Place], done: Sequence["Done"], options: argparse.Namespace) -> None:
    """The table of all cells, or the same as one JSON document."""
    from tprimat.records.files import as_document
    from tprimat.report.tables import columns

    by_id = {one.cell.plan.run_id: one for one in done}
    if not options.json:
        print("\n" + columns(HEADER, [row for one in planned for row in rows(one, by_id)], left=len(HEADER)))
        finished = dict.fromkeys(one.folder for one in planned if any(has_result(one, cell) for cell in done))
        if len(finished) > 1:
            print(f"\nside by side: ./compare.py --results-dir {' '.join(finished)}", file=sys.stderr)
        return
    document = [
        {
            "folder": one.folder,
            "model": one.model,
            "strategy": one.strategy,
            "refused": None if one.refusal is None else one.refusal.what,
            "runs": [
                {"run": as_document(run.record), "metrics": run.metrics and as_document(run.metrics)}
                for cell in one.cells
                if cell.plan.run_id in by_id and (run := by_id[cell.plan.run_id].run) is not None
            ],
        }
        for one in planned
    ]
    print(json.dumps({"cells": document}, indent=2, allow_nan=False))


def rows(one: Place, by_id: dict[str, "Done"]) -> list[tuple[str, ...]]:
    """The lines of one place: one a repetition, or one that says why there is none."""
    from tprimat.units import ABSENT

    head = (one.folder, one.model, one.strategy)
    if one.refusal is not None:
        return [(*head, ABSENT, "cannot run here", ABSENT, one.refusal.what)]
    return [(*head, *outcome(cell, by_id.get(cell.plan.run_id))) for cell in one.cells]


def outcome(cell: "Cell", done: "Done | None") -> tuple[str, str, str, str]:
    """Layout, outcome, throughput with its interval, and the cause of a failure."""
    from tprimat import units
    from tprimat.report.tables import with_interval

    asked = cell.plan.layout
    layout = f"TP{asked.tensor} PP{asked.pipeline} DP{asked.data}"
    if done is None:
        return layout, "not started", units.ABSENT, "the series was stopped"
    if done.run is None:
        return layout, "not started", units.ABSENT, done.result.cause or units.ABSENT
    record, metrics = done.run.record, done.run.metrics
    rate = with_interval(metrics.tokens_per_second_per_gpu if metrics else None, units.significant, " .. ")
    why = record.cause or "; ".join(record.mismatches) or done.run.unmeasured
    said = record.outcome.replace("_", " ") + (" earlier" if done.result.skipped else "")
    return layout, said, rate, why or units.ABSENT


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all cells completed, 1 some failed (the others' results stay), 2 a mistake in what was asked."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
