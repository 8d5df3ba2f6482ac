"""Train Megatron models under a parallelism strategy and measure every step."""

import argparse
import contextlib
import io
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import COMMANDS, add_flags, print_json
from tprimat.config.options import DEGREES, OPTIONS, WHAT, WORKLOAD, names_listed, option_of
from tprimat.core import units
from tprimat.core.errors import ConfigError, UserError
from tprimat.engines import AUTO, ENGINE_NAMES

if TYPE_CHECKING:
    from tprimat.analyze.compare import Question
    from tprimat.plan.schema import RunPlan
    from tprimat.runner.cells import Cell, CellResult, PlannedEntry
    from tprimat.runner.request import RunRequest

HOW = "how"
SETTABLE = f"--set KEY=VALUE sets any key of the configuration, and these:\n{names_listed(OPTIONS)}"


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options that a command has as flags, and its own flags."""
    groups = {title: parser.add_argument_group(title) for title in (WHAT, WORKLOAD, HOW)}
    for option in (option for option in OPTIONS if command in option.commands):
        choices = (AUTO, *ENGINE_NAMES) if option.name == "engine" else option.choices
        shown = {"choices": choices} if choices else {"metavar": option.metavar}
        groups[option.group].add_argument(option.flag, help=option.help or None, **shown)
    add_flags(parser, command, {}, groups)
    if command == "sweep":
        decided = dict.fromkeys((f"--{option.name}" for option in DECIDED_HERE), "./benchmark.py")
        parser.set_defaults(hints=parser.get_default("hints") | decided | {"--model": "./run_all_configs.sh MODEL"})
        parser.set_defaults(write=False, output_dir=None)
    parser.epilog = "\n".join(filter(None, (COMMANDS[command].get("examples"), SETTABLE)))


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 all runs completed, 1 a run failed, 130 after Ctrl-C, 143 after SIGTERM."""
    if options.write and (not options.dry_run or options.launcher != "here"):
        what = "--write belongs to --dry-run, for a run that starts here."
        raise ConfigError(what, where="--write", fix="leave it out: a run writes its plan.json")
    request = request_of(options, "run", "./benchmark.py")
    if options.sweep and request.is_auto:
        what = "--parallel auto chooses one layout, and --sweep runs many configurations."
        raise ConfigError(what, where="--sweep", fix="leave out --sweep, or name a strategy")
    if options.launcher != "here":
        return _submit(options, request)
    if options.sweep:
        return _combinations(options, request)
    from tprimat.runner.auto import RACE, auto_sessions, layouts_to_measure
    from tprimat.runner.cells import Cell
    from tprimat.runner.schedule import complete, exit_status, run_cells
    from tprimat.runner.session import prepare

    sessions = auto_sessions(request) if request.is_auto else [prepare(request)]
    for notice in dict.fromkeys(notice for session in sessions for notice in session.notices):
        print(notice, file=sys.stderr)
    if len({plan.strategy for session in sessions for plan in session.plans}) > 1:
        say_processes(plan for session in sessions for plan in session.plans)
    cells = [Cell(session=session, plan=plan) for session in sessions for plan in session.plans]
    if options.dry_run:
        return _show_plans(cells, request, options)
    results = run_cells(cells, resume=options.resume)
    if not options.json:
        _show_runs(results, RACE if request.is_auto and layouts_to_measure(request) else None)
    else:
        _print_document(results)
    _say_left(cells, results, "the same call with --resume")
    return exit_status(results, success=complete(results, cells))


def _say_left(cells: "Sequence[Cell]", results: "Sequence[CellResult]", call: str) -> None:
    if left := len(cells) - sum(result.counts or not result.stop_signal for result in results):
        print(f"stopped: {left} of {len(cells)} runs are left; {call} continues from here", file=sys.stderr)


def _combinations(options: argparse.Namespace, request: "RunRequest") -> int:
    """Make the runs of --sweep: first what cannot run and why, then the runs, the ranking and one picture."""
    from tprimat.runner.cells import planned
    from tprimat.runner.request import sweep_requests
    from tprimat.runner.schedule import complete, exit_status, run_cells

    entries = planned(sweep_requests(request, options.sweep))
    refuse_nothing(entries)
    cells = [cell for entry in entries for cell in entry.cells]
    if options.dry_run:
        return _show_plans(cells, request, options)
    results = run_cells(cells, resume=True, retry_failed=options.resume)
    if options.json:
        _print_document(results)
    else:
        show(entries, results)
    _say_left(cells, results, "the same call")
    made = [str(one.cell.session.output / "runs" / one.run.record.run_id) for one in results if one.run is not None]
    counts = any(result.counts for result in results)
    drawn = not counts or draw(_relative(cells[0].session.output / "sweep.png"), ["--results-dir", *made])
    return exit_status(results, success=complete(results, cells) and drawn)


def _submit(options: argparse.Namespace, request: "RunRequest") -> int:
    """Hand the runs to SLURM, or with --dry-run print the script that it would get."""
    from tprimat.records.sharing import masked_command
    from tprimat.runner.auto import layouts_to_measure
    from tprimat.runner.request import sweep_requests
    from tprimat.runner.submit import job_of, script, submit

    list(sweep_requests(request, options.sweep or ()))  # refuses what the job would refuse
    if request.is_auto:
        layouts_to_measure(request)
    if not options.dry_run:
        return submit(request, options.words)
    sbatch, command, _ = job_of(request, options.words)
    print(script(sbatch, masked_command(command)), end="")
    return 0


def _show_runs(results: "Sequence[CellResult]", question: "Question | None") -> None:
    from tprimat.report.explain import lost_most
    from tprimat.report.summary import summary
    from tprimat.report.tables import screen_of
    from tprimat.runner.cells import combined, groups_of

    runs = [result.run for result in results if result.run is not None]
    if not runs:
        return
    screen, groups = screen_of(sys.stdout), groups_of(runs)
    together = combined(groups, screen, question)
    rows = [(run.record, run.metrics or run.unmeasured, run.log) for run in runs]
    print("\n" + summary(rows, screen, groups if together else ()))
    for line in lost_most(runs[0].lost) if len(runs) == 1 and runs[0].lost else ():
        print(line)
    if together:
        print("\n" + together)
    if written := dict.fromkeys(str(_relative(run.benchmark_file)) for run in runs if run.benchmark_file):
        print("\nresults: " + ", ".join(written))
    for one, trace in ((run, trace) for run in runs for trace in run.traces):
        explain = f"; python3 -m tprimat explain {_relative(trace.parent)} says where the time went"
        print(f"trace: {_relative(trace)} (ui.perfetto.dev draws it{explain * (one.record.machine.platform != 'cpu')})")


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _predicted_step(cell: "Cell") -> str | None:
    """Say how long a step is predicted to take; None where the run does not fit, or nothing predicts it."""
    from tprimat.runner.prediction import gate

    plan, work = cell.plan, cell.plan.workload
    fit = gate(plan, cell.session.machine_of(plan))
    if not (guess := plan.prediction) or not guess.step_seconds or (fit is not None and fit[0] == "does not fit"):
        return None
    speed = units.count(work.tokens_per_step / guess.step_seconds / work.layout.world_size)
    ends = ", ".join(map(units.seconds, (guess.step_seconds_low, guess.step_seconds_high)))
    return f"Predicted: {units.seconds(guess.step_seconds)} [{ends}] a step, {speed} tokens/s/GPU"


def _show_plans(cells: "Sequence[Cell]", request: "RunRequest", options: argparse.Namespace) -> int:
    """Print plans, and once what was checked for them. Return 1 where a run would meet a problem here."""
    from tprimat.cli.checks import show_checks
    from tprimat.engines.base import engine_named
    from tprimat.plan.schema import write_plan
    from tprimat.records.environment import masked_environment
    from tprimat.records.sharing import without_secrets
    from tprimat.records.store import RunDirectory, as_document
    from tprimat.report.tables import screen_of
    from tprimat.runner.checks import check_session, command_shown, predicted_lead
    from tprimat.runner.run import announcement

    planned = list({id(cell.session): cell.session for cell in cells}.values())  # repetitions share one
    every = [cell.plan for cell in cells]
    checks = [check for session in planned for check in check_session(session, several=len(every) > 1)]
    checks = sorted(dict.fromkeys(checks), key=lambda check: check.name == "disk")
    failed = any(check.status == "problem" for check in checks)
    if options.write:
        for plan in every:
            write_plan(RunDirectory(Path(plan.run_directory)).plan_file, plan)
    if options.json:
        plans = [replace(plan, environment=masked_environment(plan.environment)) for plan in every]
        print_json({"plans": [as_document(plan) for plan in plans], "checks": [asdict(check) for check in checks]})
        return int(failed)
    alike = [replace(plan, run_id="", run_directory="", seed=0) for plan in every]
    for place, plan in enumerate(every):
        if alike[place] in alike[:place] and not options.write:
            continue
        command, work, runs = command_shown(plan), plan.workload, alike.count(alike[place])
        environment = {**command.environment, **masked_environment(plan.environment)}
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        words = without_secrets(" ".join([*variables, shlex.join(command.argv)]))
        swept = f" {cells[place].label}" if "=" in cells[place].label else ""
        print(f"{plan.model} ({work.shape.name}){swept} on {plan.platform}, engine {plan.engine} ({plan.engine_reason})")
        print(announcement(plan))
        print(
            f"Workload: {plan.steps} step{'s' * (plan.steps > 1)} of {work.global_batch_sequences} x {work.sequence_tokens} "
            f"tokens, micro-batch {work.micro_batch_sequences}, {work.format}, recompute {work.recompute_words}, "
            f"data {plan.dataset}" + (f", {runs} runs" if runs > 1 else "")
        )
        if remark := engine_named(plan.engine).remark(plan):
            print(remark)
        if step := _predicted_step(cells[place]):
            print(step)
        print(f"Command{'' if options.write else ' (--write writes the plan.json that it needs)'}: {words}\n")
    show_checks(checks)
    for line in dict.fromkeys(line for session in planned for line in predicted_lead(session, request)):
        print(screen_of(sys.stdout).prose(line, 2))
    print("Nothing was started." if options.write else "Nothing was started or written.")
    return int(failed)


# The five strategies, one folder each.

DECIDED_HERE = (option_of("model"), option_of("parallel"), *DEGREES)
PICTURES = Path("all_outputs")


def sweep(options: argparse.Namespace) -> int:
    """Exit status: 0 when every cell has a run that counts, 130 after Ctrl-C, 143 after SIGTERM, else 1."""
    from tprimat.runner.cells import named_twice, planned, without_twins
    from tprimat.runner.request import RunRequest, strategy_requests, words
    from tprimat.runner.schedule import complete, exit_status, run_cells

    request = request_of(options, "sweep", "./run_all_configs.sh")
    for option in DECIDED_HERE:
        if getattr(request, field := option.field or option.name) != getattr(RunRequest(), field):
            where, fix = f"--set {option.name}", "./run_all_configs.sh MODEL" if option.name == "model" else "./benchmark.py"
            raise ConfigError(f"{where} is not for this command.", where=where, fix=fix)
    models = ("llama", "qwen") if options.models == "both" else words(options.models)
    entries = planned(strategy_requests(request, models))
    refuse_nothing(entries)
    cells, twins = without_twins(entries)
    for twin in dict.fromkeys(f"{later.name} is {first.plan.strategy} on {later.plan.platform}" for later, first in twins):
        print(f"{twin}: run once", file=sys.stderr)
    if options.dry_run:
        return _show_plans(cells, request, options)
    results = run_cells(cells, resume=not options.fresh)
    success = complete(results, cells) and not any(entry.refusal and not entry.left_out for entry in entries)
    _say_left(cells, results, "the same call")
    results += named_twice(results, twins)
    counting = sorted({result.cell.label for result in results if result.counts})
    probes = [word for place in request.probes for word in ("--set", f"probes={place}")]
    for folder in counting:
        success &= draw(PICTURES / f"compare-{folder.removeprefix('output-')}.png", ["--results-dir", folder, *probes])
    picture = PICTURES / "compare-all.png"
    own = [folder for folder in counting if folder in {cell.label for cell in cells}]
    drawn = len(own) > 1 and draw(picture, ["--results-dir", *own, *probes])
    if options.json:
        _print_document(results)
    else:
        show(entries, results)
        if drawn:
            print(f"\nside by side: {picture}", file=sys.stderr)
    return exit_status(results, success=success and (drawn or len(own) < 2))


# What both commands share: the request that flags make, and the table of many runs.


def request_of(options: argparse.Namespace, command: str, program: str) -> "RunRequest":
    """Return what the flags of `add_arguments` ask for. Raises ConfigError: a value does not fit its option."""
    from tprimat.records.sharing import masked_command
    from tprimat.runner.request import RunRequest, with_settings, with_values

    typed = {option.name: getattr(options, option.name) for option in OPTIONS if command in option.commands}
    output = Path(options.output_dir) if options.output_dir else None
    own = RunRequest(config=options.config, output=output, force=options.force, dry_run=options.dry_run)
    request = with_settings(own, options.settings)
    request = with_values(request, ((name, text) for name, text in typed.items() if text is not None), "--")
    return replace(request, command=masked_command((program, *options.words)))


def refuse_nothing(entries: "Sequence[PlannedEntry]") -> None:
    """Name what cannot run here and why, each once, and stop if nothing else is left."""
    reasons: dict[str, list[PlannedEntry]] = {}
    for entry in entries:
        if (refusal := entry.refusal) is not None:
            reasons.setdefault(str(UserError(refusal.what, fix=refusal.fix)), []).append(entry)
    nothing = not any(entry.cells for entry in entries)
    if nothing and len(reasons) == 1 and entries[0].refusal:
        raise entries[0].refusal
    for reason, stopped in reasons.items():
        names = ", ".join(f"{entry.model} {entry.label if '=' in entry.label else entry.strategy}" for entry in stopped)
        print(f"{names}: cannot run here. {reason}", file=sys.stderr)
    if nothing:
        what = f"None of the {len(entries)} runs can start here."
        raise ConfigError(what, why="Each is refused above.", fix="a way out named there")
    say_processes(cell.plan for entry in entries for cell in entry.cells)


def say_processes(plans: "Iterable[RunPlan]") -> None:
    """Say over how many processes of a CPU several configurations run."""
    ranks = {plan.workload.layout.world_size for plan in plans if plan.platform == "cpu"}
    if len(ranks) == 1:
        print(f"Each configuration runs as {ranks.pop()} processes on this CPU; --gpus sets another number.", file=sys.stderr)


def _print_document(results: "Sequence[CellResult]") -> None:
    from tprimat.report.summary import document
    from tprimat.runner.cells import combined_document

    runs = [result.run for result in results if result.run is not None]
    rows = document([(run.record, run.metrics, run.benchmark_file, run.log) for run in runs])
    print_json({**rows, "combined": combined_document(runs)})


def show(entries: "Sequence[PlannedEntry]", results: "Sequence[CellResult]") -> None:
    """Print the ranking of all runs, and the table of all cells where it says more: a folder, or why one has no place in it."""
    from tprimat.analyze.compare import rankings
    from tprimat.report.tables import screen_of
    from tprimat.runner.cells import combined, groups_of, measured_lead, table

    screen, groups = screen_of(sys.stdout), groups_of([result.run for result in results if result.run is not None])
    if winners := combined(groups, screen):
        print("\n" + winners)
    ranked = len(rankings(groups)) == 1 and len(results) > 1 and all(result.counts for result in results)
    if not ranked or not all(entry.cells and "=" in entry.label for entry in entries):
        print("\n" + table(entries, results, screen))
    for line in measured_lead(groups):
        print("\n" + screen.prose(line, 2))


def draw(picture: Path, words: Sequence[str]) -> bool:
    """Draw the picture of a comparison, whose words were said already; return whether that was possible."""
    from tprimat.cli.main import start

    with contextlib.redirect_stdout(io.StringIO()):
        return start("compare", "compare.py", [*words, "--output", str(picture)]) == 0
