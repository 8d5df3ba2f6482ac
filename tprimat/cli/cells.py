"""What `run` and `sweep` share: the flags that make a request, many runs in a row, and the table of them."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import print_json
from tprimat.config.options import OPTIONS, WHAT, WORKLOAD, hints, names_listed
from tprimat.core.errors import ConfigError, UserError
from tprimat.engines import AUTO, ENGINE_NAMES

if TYPE_CHECKING:
    from tprimat.runner.matrix import MatrixEntry
    from tprimat.runner.request import RunRequest
    from tprimat.runner.sweep import CellResult

HOW = "how"
SETTABLE = f"--set KEY=VALUE sets any key of the configuration, and these:\n{names_listed(OPTIONS)}"


def add_request(parser: argparse.ArgumentParser, command: str) -> dict[str, argparse._ArgumentGroup]:
    """Add the flags that make a request, and return their groups."""
    parser.set_defaults(hints=hints(OPTIONS))
    groups = {title: parser.add_argument_group(title) for title in (WHAT, WORKLOAD, HOW)}
    for option in (option for option in OPTIONS if command in option.commands):
        choices = (AUTO, *ENGINE_NAMES) if option.name == "engine" else option.choices
        shown = {"choices": choices} if choices else {"metavar": option.metavar}
        groups[option.group].add_argument(option.flag, help=option.help or None, **shown)
    how = groups[HOW]
    how.add_argument("--config", type=Path, metavar="FILE", help="instead of config.yaml")
    how.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="any key of the configuration, or below"
    )
    how.add_argument("--force", action="store_true", help="start even what is predicted not to fit, or an unknown Megatron-Core")
    how.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    return groups


def request_of(options: argparse.Namespace, command: str, program: str) -> "RunRequest":
    """Return what the flags of `add_request` ask for.

    Raises:
        ConfigError: a value is none of its option.
    """
    from tprimat.records.sharing import masked_command
    from tprimat.runner.request import RunRequest, with_settings, with_values

    typed = {option.name: getattr(options, option.name) for option in OPTIONS if command in option.commands}
    request = with_settings(RunRequest(config=options.config, force=options.force), options.settings)
    request = with_values(request, ((name, text) for name, text in typed.items() if text is not None), "--")
    return replace(request, command=masked_command((program, *sys.argv[1:])))


def make_runs(entries: "Sequence[MatrixEntry]", *, resume: bool, retry_failed: bool) -> "tuple[list[CellResult], bool]":
    """Make the runs of some entries, and return them, and whether all of them count.

    Raises:
        UserError: none of them can run here.
    """
    from tprimat.runner.sweep import run_cells

    cells = [cell for entry in entries for cell in entry.cells]
    if not cells:
        raise _refusal_of_all(entries)
    results = run_cells(cells, resume=resume, messages=sys.stderr, retry_failed=retry_failed)
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


def show(entries: "Sequence[MatrixEntry]", results: "Sequence[CellResult]", *, as_json: bool) -> None:
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
