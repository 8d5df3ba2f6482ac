"""Run each of the five strategies of config.yaml into a folder of its own, then compare them.

./run_all_configs.sh                      both models: output-00 to output-04, all_outputs/compare-00.png to compare-04.png
./run_all_configs.sh llama --steps 3      flags of ./benchmark.py are passed on
./run_all_configs.sh qwen --fresh         also what an earlier call has completed
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
from tprimat.errors import ConfigError

if TYPE_CHECKING:
    from tprimat.runner.matrix import MatrixEntry
    from tprimat.runner.sweep import CellResult

MODELS = {"llama": ("llama",), "qwen": ("qwen",), "both": ("llama", "qwen")}
DECIDED_HERE = {"model": "all", "parallel": None, "output_dir": None, "dry_run": False, "scaling": None}
DECIDED_HERE |= dict.fromkeys(DEGREES)
"""Flags of ./benchmark.py that this command sets, with their defaults there."""
PICTURES = Path("all_outputs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run, and those of the sweep."""
    add_request(parser)
    parser.add_argument("models", nargs="?", choices=tuple(MODELS), default="both", help="default: both")
    parser.add_argument("--fresh", action="store_true", help="run also what an earlier call has completed")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 when every cell has a run that counts, else 1.

    Raises:
        ConfigError: a flag that this command sets itself.
        UserError: no cell can run here.
    """
    from tprimat.engines.base import engine_named, require_worker_modules
    from tprimat.runner.matrix import plan_matrix
    from tprimat.runner.sweep import run_cells

    for name, default in DECIDED_HERE.items():
        if getattr(options, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is not for this command.", where=flag, fix="./benchmark.py takes it")
    entries = plan_matrix(request_of(options, "./run_all_configs.sh"), MODELS[options.models])
    cells = [cell for entry in entries for cell in entry.cells]
    if not cells:
        raise next(entry.refusal for entry in entries if entry.refusal is not None)
    if engine_named(cells[0].plan.engine).runs_worker:
        require_worker_modules()
    results = run_cells(cells, quiet=options.quiet, resume=not options.fresh, messages=sys.stderr)
    counting = list(dict.fromkeys(entry.folder for entry in entries if entry.counts_in(results)))
    compared = draw(counting, options.probes)
    show(entries, results, counting, as_json=options.json)
    complete = len(results) == len(cells) and all(result.counts for result in results)
    return 0 if complete and compared and not any(entry.refusal and not entry.left_out for entry in entries) else 1


def draw(folders: Sequence[str], probes: Sequence[Path]) -> bool:
    """Draw the picture of each folder. One comparison of all folders follows in words."""
    from tprimat.cli.compare_all import draw_folders

    with contextlib.redirect_stdout(io.StringIO()):
        return draw_folders([Path(folder) for folder in folders], PICTURES, probes) == 0


def show(entries: "Sequence[MatrixEntry]", results: "Sequence[CellResult]", folders: Sequence[str], *, as_json: bool) -> None:
    """Print the table of all cells, or the same as one JSON document."""
    from tprimat.report.screen import screen_of
    from tprimat.runner.matrix import matrix_document, matrix_table, sweep_winners

    if as_json:
        print_json(matrix_document(entries, results))
        return
    screen = screen_of(sys.stdout)
    if winners := sweep_winners(results, screen):
        print("\n" + winners)
    print("\n" + matrix_table(entries, results, screen))
    if len(folders) > 1:
        print(f"\nside by side: ./compare.py --results-dir {' '.join(folders)}", file=sys.stderr)
