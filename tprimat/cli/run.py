"""Train Megatron models under a parallelism strategy and measure every step."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.cells import HOW, SETTABLE, add_request, draw, print_document, refuse_nothing, request_of, show
from tprimat.cli.common import print_json
from tprimat.config.options import WHAT
from tprimat.core.errors import ConfigError

if TYPE_CHECKING:
    from tprimat.analyze.compare import Question
    from tprimat.runner.cells import CellResult
    from tprimat.runner.request import RunRequest
    from tprimat.runner.session import Session

EPILOG = f"""examples:
  ./benchmark.py                                         both models, minimal_communication
  ./benchmark.py --model llama --parallel balanced --runs 3
  ./benchmark.py --model llama --tp 2 --pp 2             your own layout
  ./benchmark.py --parallel balanced,truly_identical     one after the other, then which is faster
  ./benchmark.py --dry-run --platform nvidia             the plan and the exact command; starts nothing
  ./benchmark.py --set training.optimizer.learning_rate=1e-4
  ./benchmark.py --model llama --sweep tp=1,2,4 --sweep pp=1,2
  ./benchmark.py --report                                one HTML page on the results in ./output

exit status: 0 all runs completed, 1 a run failed (the other results stay), 2 the request is invalid,
130 stopped by Ctrl-C, 143 by SIGTERM

{SETTABLE}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of ./benchmark.py."""
    groups = add_request(parser, "run")
    what, how = groups[WHAT], groups[HOW]
    what.add_argument(
        "--launcher",
        choices=("here", "slurm"),
        default="here",
        help="hand the runs to a scheduler (docs/clusters.md)",
    )
    what.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="run every combination of these values of an option or a key of the configuration; may be repeated",
    )
    how.add_argument("--output-dir", metavar="PATH", help="results and logs (default: $OUTPUT_DIR, ./output)")
    how.add_argument(
        "--resume",
        action="store_true",
        help="skip runs that have completed in the output folder; failed and interrupted ones start again; a sweep always "
        "continues, and with --resume repeats what failed",
    )
    how.add_argument("--dry-run", action="store_true", help="print the plan, the exact command and checks; start nothing")
    how.add_argument(
        "--report", action="store_true", help="train nothing: write report.html, one page on all results in --output-dir, there"
    )


def run_request(options: argparse.Namespace) -> "RunRequest":
    """Return what the flags ask for."""
    output = Path(options.output_dir) if options.output_dir else None
    return replace(request_of(options, "run", "./benchmark.py"), output=output, dry_run=options.dry_run)


def pretrain(model: str) -> int:
    """Run pretrain_{model}.py: one rank of a plan under torchrun (`--plan PATH`), else the benchmark of one model."""
    words = sys.argv[1:]
    if "--plan" in words:
        from tprimat.train.worker import main as train

        return train(words)
    from tprimat.cli.console import run_as_script
    from tprimat.cli.main import start

    return run_as_script(lambda: start("run", f"pretrain_{model}.py", ["--model", model, *words]))


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 all runs completed, 1 a run failed, 130 after Ctrl-C, 143 after SIGTERM."""
    if options.report:
        return _report(options)
    request = run_request(options)
    if options.sweep and request.is_auto:
        what = "--parallel auto chooses one layout, and --sweep runs many configurations."
        raise ConfigError(what, where="--sweep", fix="leave out --sweep, or name a strategy")
    if options.launcher != "here":
        return _submit(options, request)
    return _sweep(options, request) if options.sweep else _train(options, request)


def _train(options: argparse.Namespace, request: "RunRequest") -> int:
    from tprimat.runner.auto import RACE, auto_sessions, layouts_to_measure
    from tprimat.runner.cells import entries_of
    from tprimat.runner.schedule import complete, exit_status, run_cells
    from tprimat.runner.session import prepare

    sessions = auto_sessions(request) if request.is_auto else [prepare(request)]
    for notice in dict.fromkeys(notice for session in sessions for notice in session.notices):
        print(notice, file=sys.stderr)
    if options.dry_run:
        return max([_show_plans(session, as_json=options.json) for session in sessions])
    cells = [cell for session in sessions for entry in entries_of(session) for cell in entry.cells]
    results = run_cells(cells, resume=options.resume)
    if not options.json:
        _show_runs(results, RACE if request.is_auto and layouts_to_measure(request) else None)
    else:
        print_document(results)
    if left := len(cells) - len(results):
        print(f"not started: {left} of {len(cells)} runs; the same call with --resume continues from here", file=sys.stderr)
    return exit_status(results, success=complete(results, cells))


def _sweep(options: argparse.Namespace, request: "RunRequest") -> int:
    """Make the runs of --sweep: first what cannot run and why, then the runs, the ranking and one picture."""
    from tprimat.runner.cells import planned
    from tprimat.runner.grid import sweep_requests
    from tprimat.runner.schedule import complete, exit_status, run_cells

    entries = planned(sweep_requests(request, options.sweep))
    refuse_nothing(entries)
    cells = [cell for entry in entries for cell in entry.cells]
    if options.dry_run:
        for entry in (entry for entry in entries if entry.cells):
            print(f"{entry.model} {entry.label}: {len(entry.cells)} run{'s' * (len(entry.cells) > 1)}")
        print("Nothing was started or written.")
        return 0
    results = run_cells(cells, resume=True, retry_failed=options.resume)
    if options.json:
        print_document(results)
    else:
        show(entries, results)
    made = [str(one.cell.session.output / "runs" / one.run.record.run_id) for one in results if one.run is not None]
    counts = any(result.counts for result in results)
    drawn = not counts or draw(cells[0].session.output / "sweep.png", ["--results-dir", *made])
    return exit_status(results, success=complete(results, cells) and drawn)


def _submit(options: argparse.Namespace, request: "RunRequest") -> int:
    """Hand the runs to SLURM, or with --dry-run print the script that it would get."""
    from tprimat.launch.slurm import script
    from tprimat.records.sharing import masked_command
    from tprimat.runner.auto import layouts_to_measure
    from tprimat.runner.submit import job_of, submit

    if request.is_auto:
        layouts_to_measure(request)  # refuses what the job would refuse
    if not options.dry_run:
        return submit(request, options.words)
    job, _ = job_of(request, options.words)
    print(script(replace(job, command=masked_command(job.command))), end="")
    return 0


def _show_runs(results: "Sequence[CellResult]", question: "Question | None") -> None:
    from tprimat.report.summary import summary
    from tprimat.report.tables import screen_of
    from tprimat.runner.combine import combined

    runs = [result.run for result in results if result.run is not None]
    if not runs:
        return
    screen = screen_of(sys.stdout)
    together = combined(runs, screen, question)
    print("\n" + summary([(run.record, run.metrics or run.unmeasured, run.log) for run in runs], screen, brief=bool(together)))
    if together:
        print("\n" + together)
    if written := dict.fromkeys(str(_relative(run.benchmark_file)) for run in runs if run.benchmark_file):
        print("\nresults: " + ", ".join(written))
    for trace in (trace for run in runs for trace in run.traces):
        print(f"trace: {_relative(trace)} (ui.perfetto.dev draws it; tprimat trace FILE says what a step spends its time on)")


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _show_plans(session: "Session", *, as_json: bool) -> int:
    """Print plans, and what was checked for them. Return 1 where a run would meet a problem here."""
    from tprimat.cli.doctor import show_checks
    from tprimat.records.environment import masked_environment
    from tprimat.records.sharing import without_secrets
    from tprimat.records.store import as_document
    from tprimat.runner.dry_run import check_session, command_shown
    from tprimat.runner.run import announcement

    checks = list(check_session(session))
    failed = any(check.status == "problem" for check in checks)
    if as_json:
        plans = [replace(plan, environment=masked_environment(plan.environment)) for plan in session.plans]
        print_json({"plans": [as_document(plan) for plan in plans], "checks": [asdict(check) for check in checks]})
        return int(failed)
    for plan in session.plans:
        command, work = command_shown(plan), plan.workload
        environment = {**command.environment, **masked_environment(plan.environment)}
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        words = without_secrets(" ".join([*variables, shlex.join(command.argv)]))
        print(f"{plan.model} ({work.shape.name}) on {plan.platform}, engine {plan.engine}: {plan.engine_reason}")
        print(announcement(plan))
        print(
            f"Workload: {plan.steps} steps of {work.global_batch_sequences} x {work.sequence_tokens} tokens, micro-batch "
            f"{work.micro_batch_sequences}, {work.matmul_dtype}, recompute {work.recompute_words}, data {plan.dataset}"
        )
        print(f"Command (a real run writes plan.json first): {words}\n")
    show_checks(checks)
    print("Nothing was started or written.")
    return int(failed)


def _report(options: argparse.Namespace) -> int:
    """Write the page about the results that exist."""
    from tprimat.cli.main import start
    from tprimat.config.load import environment_choices

    if options.dry_run:
        raise ConfigError("--report trains nothing.", where="--dry-run", fix="leave out one of them")
    output = options.output_dir or environment_choices().output_directory
    words = [word for text in options.settings if text.startswith("probes=") for word in ("--set", text)]
    return start("report", "tprimat report", [output, "--output", str(Path(output, "report.html")), *words])
