"""Run each of the five strategies of config.yaml in its own folder, then compare them.

./run_all_configs.sh                      both models: output-00 to output-04, all_outputs/compare-00.png to compare-04.png
./run_all_configs.sh llama --steps 3      flags of ./benchmark.py are passed on
./run_all_configs.sh qwen --fresh         also run what an earlier call has completed
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import print_json
from tprimat.cli.run import DEGREES, add_request, request_of
from tprimat.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from tprimat.runner.matrix import MatrixEntry
    from tprimat.runner.session import RunRequest
    from tprimat.runner.sweep import CellResult

MODELS = {"llama": ("llama",), "qwen": ("qwen",), "both": ("llama", "qwen")}
DECIDED_HERE: dict[str, object] = {
    "model": "all",
    "parallel": None,
    "output_dir": None,
    "dry_run": False,
    "scaling": None,
    "scaling_mode": "weak",
    "measure": None,
    "sweep": [],
    "launcher": "here",
}
DECIDED_HERE |= dict.fromkeys(DEGREES)
"""Flags of ./benchmark.py that this command sets, with their defaults there."""
PICTURES = Path("all_outputs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run, and those of the sweep."""
    add_request(parser)
    for action in parser._actions:
        if action.dest in DECIDED_HERE:
            action.help = argparse.SUPPRESS  # refused below with what to type instead
    parser.add_argument("models", nargs="?", choices=tuple(MODELS), default="both", help="default: both")
    parser.add_argument("--fresh", action="store_true", help="also run what an earlier call has completed")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 when every cell has a run that counts, 130 after Ctrl-C, 143 after SIGTERM, else 1.

    Raises:
        ConfigError: a flag that this command sets itself.
        UserError: no cell can run here.
    """
    from tprimat.runner.grid import only
    from tprimat.runner.matrix import plan_matrix
    from tprimat.runner.sweep import exit_status

    for name, default in DECIDED_HERE.items():
        if getattr(options, name) != default:
            flag = "--" + name.replace("_", "-")
            mine = options.model if options.model in MODELS else ", ".join(MODELS)
            model = f"./run_all_configs.sh {mine}" + ("" if options.model in MODELS else "; ./benchmark.py --model for any other")
            fix = model if name == "model" else "./benchmark.py takes it"
            raise ConfigError(f"{flag} is not for this command.", where=flag, fix=fix)
    entries = only(plan_matrix(request_of(options, "./run_all_configs.sh"), MODELS[options.models]), options.only)
    results, complete = make_runs(entries, options, resume=not options.fresh, retry_failed=True)
    counting = list(dict.fromkeys(entry.folder for entry in entries if entry.counts_in(results)))
    compared = draw(counting, options.probes)
    show(entries, results, counting, as_json=options.json)
    refused = any(entry.refusal is not None and not entry.left_out for entry in entries)
    return exit_status(results, success=complete and compared and not refused)


def run_grid(options: argparse.Namespace, request: "RunRequest") -> int:
    """Make the runs of `./benchmark.py --sweep`: first what cannot run and why, then the runs, the ranking and one picture.

    Raises:
        ConfigError: no combination can run here.
    """
    from tprimat.cli.main import start
    from tprimat.runner.grid import only, parse_sweep, plan_sweep
    from tprimat.runner.sweep import exit_status

    entries = only(plan_sweep(request, parse_sweep(options.sweep)), options.only)
    for entry in (entry for entry in entries if entry.refusal is not None):
        print(f"{entry.model} {entry.folder}: cannot run here. {entry.refusal}", file=sys.stderr)
    if options.dry_run:
        for entry in (entry for entry in entries if entry.cells):
            print(f"{entry.model} {entry.folder}: {len(entry.cells)} run{'s' * (len(entry.cells) > 1)}")
        print("Nothing was started or written.")
        return 0
    if len(entries) > 1 and not any(entry.cells for entry in entries):
        what = f"None of the {len(entries)} combinations can run here."
        raise ConfigError(
            what, where="--sweep", why="Each is refused above.", fix="other values, or a way out that is named there"
        )
    results, complete = make_runs(entries, options, resume=True, retry_failed=options.retry_failed)
    show(entries, results, (), as_json=options.json)
    drawn = True
    if any(result.counts for result in results):
        folder = results[0].cell.session.output
        made = [str(folder / "runs" / result.run.record.run_id) for result in results if result.run is not None]
        words = ["--results-dir", *made, "--output", str(folder / "sweep.png")]
        print(file=sys.stderr)
        with contextlib.redirect_stdout(io.StringIO()):
            drawn = start("compare", "compare.py", words) == 0  # which says where the picture is
    return exit_status(results, success=complete and drawn)


def make_runs(
    entries: "Sequence[MatrixEntry]", options: argparse.Namespace, *, resume: bool, retry_failed: bool
) -> "tuple[list[CellResult], bool]":
    """Make the runs of some entries, and return them, and whether all of them count.

    Raises:
        UserError: none of them can run here.
    """
    from tprimat.runner.sweep import run_cells

    cells = [cell for entry in entries for cell in entry.cells]
    if not cells:
        raise _refusal_of_all(entries)
    results = run_cells(cells, quiet=options.quiet, resume=resume, messages=sys.stderr, retry_failed=retry_failed)
    return results, len(results) == len(cells) and all(result.counts for result in results)


def _refusal_of_all(entries: "Sequence[MatrixEntry]") -> UserError:
    """Return why no entry can run: the one reason that all share; several are printed, each once with those that it stops."""
    names: dict[str, list[str]] = {}
    refusals = [(entry, entry.refusal) for entry in entries if entry.refusal is not None]
    for entry, refusal in refusals:
        names.setdefault(str(UserError(refusal.what, fix=refusal.fix)), []).append(f"{entry.model} {entry.strategy}")
    if len(names) == 1:
        return refusals[0][1]
    for reason, stopped in names.items():
        print(f"{', '.join(stopped)}: cannot run here. {reason}", file=sys.stderr)
    what = f"None of the {len(entries)} runs can start here."
    return ConfigError(what, why="Each is refused above.", fix="a way out that is named there")


def draw(folders: Sequence[str], probes: Sequence[Path]) -> bool:
    """Draw the picture of each folder; return whether all were drawn. One comparison of all folders follows in words."""
    from tprimat.cli.main import start

    words = [word for place in probes for word in ("--probes", str(place))]
    drawn = True
    for folder in folders:
        picture = PICTURES / f"compare-{folder.removeprefix('output-')}.png"
        with contextlib.redirect_stdout(io.StringIO()):
            drawn &= start("compare", "compare.py", ["--results-dir", folder, "--output", str(picture), *words]) == 0
    return drawn


def show(entries: "Sequence[MatrixEntry]", results: "Sequence[CellResult]", folders: Sequence[str], *, as_json: bool) -> None:
    """Print the table of all cells, or the same as one JSON document."""
    from tprimat.report.screen import screen_of
    from tprimat.runner.combine import combined
    from tprimat.runner.matrix import matrix_document, matrix_table

    if as_json:
        print_json(matrix_document(entries, results))
        return
    screen = screen_of(sys.stdout)
    if winners := combined([result.run for result in results if result.run is not None], screen):
        print("\n" + winners)
    print("\n" + matrix_table(entries, results, screen))
    if len(folders) > 1:
        print(f"\nside by side: ./compare.py --results-dir {' '.join(folders)}", file=sys.stderr)
