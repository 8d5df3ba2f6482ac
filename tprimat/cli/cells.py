"""What `run` and `sweep` share: the flags that make a request, and the table of many runs."""

import argparse
import contextlib
import io
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
    from tprimat.runner.cells import CellResult, Entry
    from tprimat.runner.request import RunRequest

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


def refuse_nothing(entries: "Sequence[Entry]") -> None:
    """Name what cannot run here with its reason, each once, and refuse to go on where that is everything.

    Raises:
        UserError: none of the entries can run here.
    """
    reasons: dict[str, list[Entry]] = {}
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
        raise ConfigError(what, why="Each is refused above.", fix="a way out that is named there")


def print_document(results: "Sequence[CellResult]") -> None:
    """Print each run with its metrics, and each configuration with its mean, as one JSON document."""
    from tprimat.report.summary import document
    from tprimat.runner.combine import combined_document

    runs = [result.run for result in results if result.run is not None]
    rows = document([(run.record, run.metrics, run.benchmark_file, run.log) for run in runs])
    print_json({**rows, "combined": combined_document(runs)})


def show(entries: "Sequence[Entry]", results: "Sequence[CellResult]") -> None:
    """Print the ranking of all runs, and the table of all cells."""
    from tprimat.report.tables import screen_of
    from tprimat.runner.cells import table
    from tprimat.runner.combine import combined

    screen = screen_of(sys.stdout)
    if winners := combined([result.run for result in results if result.run is not None], screen):
        print("\n" + winners)
    print("\n" + table(entries, results, screen))


def draw(picture: Path, words: Sequence[str]) -> bool:
    """Draw the picture of a comparison, whose words were said already; return whether that was possible."""
    from tprimat.cli.main import start

    with contextlib.redirect_stdout(io.StringIO()):
        return start("compare", "compare.py", [*words, "--output", str(picture)]) == 0
