"""./benchmark.py: plan, run, record, summarise."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.console import outlasting
from tprimat.cli.options import parser
from tprimat.errors import ConfigError, UserError

if TYPE_CHECKING:
    from tprimat.runner.run import TrainingRun
    from tprimat.runner.session import Session


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns:
        0 all runs completed, 1 some run failed, 2 the user's mistake.
    """
    options = parser().parse_args(arguments)
    try:
        if options.probe:
            return _probe(options)
        if options.report or options.archive:
            return _share(options)
        if options.scaling:
            return _scaling(options)
        return _benchmark(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tprimat":
            raise
        print(f"error: The Python module {error.name} is not installed for {sys.executable}.", file=sys.stderr)
        print("  try   source .venv/bin/activate after `make install`, or pip install -r requirements.txt", file=sys.stderr)
        return 2


def _probe(options: argparse.Namespace) -> int:
    from tprimat.cli.probe import main as probe
    from tprimat.config.load import environment_choices

    check_alone(options)
    words = [options.probe, "--output", options.output_dir or environment_choices().output_directory]
    for flag, value in (("--config", options.config), ("--ranks", options.gpus)):
        words += [flag, str(value)] if value is not None else []
    return probe([*words, *(["--resume"] if options.resume else []), *(["--json"] if options.json else [])])


def check_alone(options: argparse.Namespace) -> None:
    """Probes measure this machine, now, and train nothing.

    Raises:
        ConfigError: a flag of a training stands beside --probe.
    """
    known = {"probe", "output_dir", "config", "gpus", "resume", "json", "quiet"}
    defaults = parser()
    others = [name for name, value in vars(options).items() if name not in known and value != defaults.get_default(name)]
    if others:
        flag = "--set" if others[0] == "settings" else f"--{others[0].replace('_', '-')}"
        raise ConfigError(
            f"{flag} does nothing beside --probe.", where=flag, fix="leave it out: python -m tprimat.cli.probe --help"
        )


def _share(options: argparse.Namespace) -> int:
    """The page, the archive, or both, of the results that are there."""
    from tprimat.cli import archive, report
    from tprimat.config.load import environment_choices

    output = options.output_dir or environment_choices().output_directory
    prices = ["--config", options.config] if options.config else []
    probes = [word for place in options.probes for word in ("--probes", str(place))]
    status = report.main([output, "--output", str(Path(output, "report.html")), *prices, *probes]) if options.report else 0
    return max(status, archive.main([output, options.archive, *prices]) if options.archive else 0)


def _scaling(options: argparse.Namespace) -> int:
    from tprimat.cli import scale_runs  # after parsing, so that --help stays quick
    from tprimat.engines.base import engine_named
    from tprimat.engines.worker import require_worker_modules

    sessions = scale_runs.sessions(options)
    if options.dry_run:
        for session in sessions:
            _show_plans(session, options)
        return 0
    if engine_named(sessions[0].plans[0].engine).runs_worker:
        require_worker_modules()
    done, complete = scale_runs.run(sessions, options)
    if not options.json:
        _report([one.run for one in done if one.run is not None], options)
        print()
    return 0 if scale_runs.analyze(sessions, options) and complete else 1


def _benchmark(options: argparse.Namespace) -> int:
    from tprimat.engines.base import engine_named
    from tprimat.engines.worker import require_worker_modules
    from tprimat.runner.session import prepare
    from tprimat.runner.sweep import Cell, carry_out, name  # after parsing, so that --help stays quick

    session = prepare(options)
    if options.dry_run:
        _show_plans(session, options)
        return 0
    if engine_named(session.plans[0].engine).runs_worker:
        require_worker_modules()
    cells = [Cell(session=session, plan=plan) for plan in session.plans]
    done = carry_out(cells, quiet=options.quiet, resume=options.resume, messages=sys.stderr)
    runs = [one.run for one in done if one.run is not None]
    _report(runs, options)
    if left := [name(cell.plan) for cell in cells[len(done) :]]:
        what = f"{len(left)} of {len(cells)} runs ({', '.join(dict.fromkeys(left))})"
        print(f"not started: {what}; with --resume the same call goes on from here", file=sys.stderr)
    complete = len(done) == len(cells) and all(one.counts for one in done)
    return 0 if complete and all(run.benchmark_file for run in runs) else 1


def _report(runs: "Sequence[TrainingRun]", options: argparse.Namespace) -> None:
    from tprimat.report.summary import document, summary

    if options.json:
        rows = [(run.record, run.metrics, run.benchmark_file, run.log) for run in runs]
        print(json.dumps(document(rows), indent=2, allow_nan=False))
        return
    if not runs:
        return
    print("\n" + summary([(run.record, run.metrics or run.unmeasured, run.log) for run in runs]))
    written = dict.fromkeys(str(_short(run.benchmark_file)) for run in runs if run.benchmark_file)
    if written:
        print("\nresults: " + ", ".join(written))


def _short(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


def _show_plans(session: "Session", options: argparse.Namespace) -> None:
    from tprimat.records.files import as_document
    from tprimat.runner.run import announcement, command_of

    if options.json:
        print(json.dumps({"plans": [as_document(plan) for plan in session.plans]}, indent=2))
        return
    for plan in session.plans:
        command = command_of(plan)
        variables = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
        batch = plan.batch
        print(f"{plan.model} ({plan.shape.name}) on {plan.platform}, engine {plan.engine}: {plan.engine_reason}")
        print(announcement(plan))
        print(
            f"Workload: {plan.steps} steps of {batch.global_batch_sequences} x {batch.sequence_tokens} tokens, micro-batch "
            f"{batch.micro_batch_sequences}, {plan.precision}, recompute {plan.recompute}, data {plan.dataset}"
        )
        print("Command: " + " ".join([*variables, shlex.join(command.argv)]) + "\n")


if __name__ == "__main__":
    sys.exit(outlasting(main))
