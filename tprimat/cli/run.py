"""Train Megatron models under a parallelism strategy and measure every step."""

import argparse
import contextlib
import io
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.cells import HOW, SETTABLE, add_request, make_runs, request_of, show
from tprimat.cli.common import print_json
from tprimat.config.options import WHAT
from tprimat.core.errors import ConfigError

if TYPE_CHECKING:
    from tprimat.analyze.compare import Question
    from tprimat.runner.request import RunRequest
    from tprimat.runner.run import TrainingRun
    from tprimat.runner.session import Session

EPILOG = f"""examples:
  ./benchmark.py                                         both models, minimal_communication
  ./benchmark.py --model llama --parallel balanced --runs 3
  ./benchmark.py --model llama --tp 2 --pp 2             your own layout
  ./benchmark.py --parallel balanced,truly_identical     one after the other, then which is faster
  ./benchmark.py --dry-run --platform nvidia             the plan and the exact command; starts nothing
  ./benchmark.py --set training.optimizer.learning_rate=1e-4
  ./benchmark.py --model llama --sweep tp=1,2,4 --sweep pp=1,2 --sweep 'tp*pp<=4'
  ./benchmark.py --model llama --scaling 1,2,4,8         weak scaling: results in output/gpus-1 to gpus-8
  ./benchmark.py --report                                one HTML page on the results in ./output

exit status: 0 all runs completed, 1 a run failed (the other results stay), 2 the request is invalid,
130 stopped by Ctrl-C, 143 by SIGTERM

{SETTABLE}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of ./benchmark.py."""
    groups = add_request(parser, "run")
    groups[WHAT].add_argument(
        "--launcher",
        choices=("here", "slurm", "kubernetes"),
        default="here",
        help="hand the runs to a scheduler (docs/clusters.md)",
    )
    groups[WHAT].add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="run every combination of these values of an option or a key of the configuration; 'tp*pp<=8' keeps only "
        "matching ones; may be repeated; FILE.yaml holds the same",
    )
    groups[WHAT].add_argument(
        "--scaling",
        metavar="1,2,4,8",
        help="run on each of these numbers of GPUs per node with constant work per GPU (the batch is for the largest number), "
        "and compare; strong:1,2,4,8 divides one batch",
    )
    how = groups[HOW]
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
    request = request_of(options, "run", "./benchmark.py")
    return replace(
        request,
        output=Path(options.output_dir) if options.output_dir else None,
        dry_run=options.dry_run,
        elsewhere=options.dry_run and _is_elsewhere(request.platform),
    )


def _is_elsewhere(platform: str | None) -> bool:
    """Whether a named platform is not this machine's, so that what is installed here says nothing of it."""
    from tprimat.core.accelerators import PLATFORM_OF
    from tprimat.hardware.nodes import this_machine

    machine = this_machine()
    return platform not in {None, "cpu", PLATFORM_OF[machine.platform] if machine else "cpu"}


def pretrain(model: str) -> int:
    """Run pretrain_{model}.py: one rank of a plan under torchrun (`--plan PATH`), else the benchmark of one model."""
    words = sys.argv[1:]
    if "--plan" in words:
        from tprimat.train.worker import main as train

        return train(words)
    from tprimat.cli.main import start
    from tprimat.report.console import run_as_script

    return run_as_script(lambda: start("run", f"pretrain_{model}.py", ["--model", model, *words]))


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 all runs completed, 1 a run failed, 130 after Ctrl-C, 143 after SIGTERM."""
    if options.report:
        return _report(options)
    return _train(options)


def _train(options: argparse.Namespace) -> int:
    from tprimat.runner.scaling import parse_scaling, scaling_sessions
    from tprimat.runner.session import prepare
    from tprimat.runner.sweep import complete, exit_status, run_cells, session_cells

    request, race = run_request(options), None
    measured = _layouts_to_measure(options, request) if request.is_auto else None
    if options.launcher != "here":
        return _submit(options, request)
    if options.sweep:
        return _train_grid(options, request)
    if request.is_auto:
        from tprimat.runner.auto import Race, auto_sessions

        contenders = auto_sessions(request, measured)
        sessions = [contender.session for contender in contenders]
        race = Race(contenders, lambda text: print(text, file=sys.stderr)) if measured else None
    else:
        sessions = scaling_sessions(request, *parse_scaling(options.scaling)) if options.scaling else [prepare(request)]
    for notice in dict.fromkeys(notice for session in sessions for notice in session.notices):
        print(notice, file=sys.stderr)
    if options.dry_run:
        return max([_show_plans(session, as_json=options.json) for session in sessions])
    cells = race.cells() if race else session_cells(sessions)
    results = run_cells(cells, resume=options.resume, messages=sys.stderr)
    if race:
        print(race.conclusion(results), file=sys.stderr)
    runs = [result.run for result in results if result.run is not None]
    if not (options.scaling and options.json):
        _show_runs(runs, as_json=options.json, question=race.question if race else None)
    if left := [cell.name for cell in cells[len(results) :]]:
        what = f"{len(left)} of {len(cells)} runs ({', '.join(dict.fromkeys(left))})"
        print(f"not started: {what}; the same call with --resume continues from here", file=sys.stderr)
    analysed = _analyse_scaling(sessions, as_json=options.json) if options.scaling else True
    return exit_status(results, success=complete(results, cells) and analysed)


def _layouts_to_measure(options: argparse.Namespace, request: "RunRequest") -> int | None:
    """Return how many layouts --parallel auto measures; refuse what it would not do, before anything starts or is submitted."""
    from tprimat.runner.auto import layouts_to_measure

    measured = layouts_to_measure(request)
    for flag, value in (("--sweep", options.sweep), ("--scaling", options.scaling)):
        if value:
            what = f"--parallel auto chooses one layout, and {flag} runs many configurations."
            raise ConfigError(what, where=flag, fix=f"leave out {flag}, or name a strategy")
    return measured


def _train_grid(options: argparse.Namespace, request: "RunRequest") -> int:
    """Make the runs of --sweep: first what cannot run and why, then the runs, the ranking and one picture.

    Raises:
        ConfigError: no combination can run here.
    """
    from tprimat.cli.main import start
    from tprimat.runner.grid import parse_sweep, plan_sweep
    from tprimat.runner.sweep import exit_status

    entries = plan_sweep(request, parse_sweep(options.sweep))
    for entry in (entry for entry in entries if entry.refusal is not None):
        print(f"{entry.model} {entry.folder}: cannot run here. {entry.refusal}", file=sys.stderr)
    if options.dry_run:
        for entry in (entry for entry in entries if entry.cells):
            print(f"{entry.model} {entry.folder}: {len(entry.cells)} run{'s' * (len(entry.cells) > 1)}")
        print("Nothing was started or written.")
        return 0
    if len(entries) > 1 and not any(entry.cells for entry in entries):
        what, fix = f"None of the {len(entries)} combinations can run here.", "other values, or a way out that is named there"
        raise ConfigError(what, where="--sweep", why="Each is refused above.", fix=fix)
    results, complete = make_runs(entries, resume=True, retry_failed=options.resume)
    show(entries, results, as_json=options.json)
    drawn = True
    if any(result.counts for result in results):
        folder = results[0].cell.session.output
        made = [str(folder / "runs" / result.run.record.run_id) for result in results if result.run is not None]
        words = ["--results-dir", *made, "--output", str(folder / "sweep.png")]
        print(file=sys.stderr)
        with contextlib.redirect_stdout(io.StringIO()):
            drawn = start("compare", "compare.py", words) == 0  # which says where the picture is
    return exit_status(results, success=complete and drawn)


def _submit(options: argparse.Namespace, request: "RunRequest") -> int:
    """Hand the runs to a scheduler, or with --dry-run print what it would get."""
    from tprimat.runner.scaling import at_largest, parse_scaling
    from tprimat.runner.submit import shown, submit_to_kubernetes, submit_to_slurm

    request = at_largest(request, parse_scaling(options.scaling)[0]) if options.scaling else request
    more = ["--scaling", options.scaling] if options.scaling else []
    more += [word for text in options.sweep for word in ("--sweep", text)]
    more += ["--resume"] if options.sweep and options.resume else []
    if options.dry_run:
        print(shown(request, more, options.launcher), end="")
        return 0
    return (submit_to_slurm if options.launcher == "slurm" else submit_to_kubernetes)(request, more, sys.stderr)


def _show_runs(runs: "Sequence[TrainingRun]", *, as_json: bool, question: "Question | None" = None) -> None:
    from tprimat.report.screen import screen_of
    from tprimat.report.summary import document, summary
    from tprimat.runner.combine import combined, combined_document

    if as_json:
        found = document([(run.record, run.metrics, run.benchmark_file, run.log) for run in runs])
        print_json({**found, "combined": combined_document(runs)})
        return
    if not runs:
        return
    screen = screen_of(sys.stdout)
    together = combined(runs, screen, question)
    print("\n" + summary([(run.record, run.metrics or run.unmeasured, run.log) for run in runs], screen, brief=bool(together)))
    if together:
        print("\n" + together)
    written = dict.fromkeys(str(_relative(run.benchmark_file)) for run in runs if run.benchmark_file)
    if written:
        print("\nresults: " + ", ".join(written))
    for trace in (trace for run in runs for trace in run.traces):
        print(f"trace: {_relative(trace)} (ui.perfetto.dev draws it; tprimat trace FILE says what a step spends its time on)")


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _analyse_scaling(sessions: "Sequence[Session]", *, as_json: bool) -> bool:
    """Print and draw what the runs show. Return False where they show nothing."""
    from tprimat.cli.main import start

    folders = [str(session.output) for session in sessions if session.output.is_dir()]
    if not as_json:
        print()
    words = [*folders, "--output", str(sessions[0].output.parent), "--format", "json" if as_json else "text"]
    return start("scaling", "tprimat scaling", words) == 0


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
        command = command_shown(session, plan)
        environment = {**command.environment, **masked_environment(plan.environment)}
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        batch, recompute = plan.workload, plan.workload.recompute_words
        print(f"{plan.model} ({plan.workload.shape.name}) on {plan.platform}, engine {plan.engine}: {plan.engine_reason}")
        print(announcement(plan))
        print(
            f"Workload: {plan.steps} steps of {batch.global_batch_sequences} x {batch.sequence_tokens} tokens, micro-batch "
            f"{batch.micro_batch_sequences}, {plan.workload.matmul_dtype}, recompute {recompute}, data {plan.dataset}"
        )
        words = without_secrets(" ".join([*variables, shlex.join(command.argv)]))
        print(f"Command, on the plan.json that a real run writes first: {words}\n")
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
    words += ["--set", f"prices={options.config}"] if options.config else []
    return start("report", "tprimat report", [output, "--output", str(Path(output, "report.html")), *words])
