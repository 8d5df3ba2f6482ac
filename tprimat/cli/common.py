"""Flags that several commands share, and their parsers."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tprimat.config.options import COUNTING, OPTIONS, assignment, count, hints
from tprimat.core.errors import ConfigError, RecordError
from tprimat.core.rows import DATA, document

if TYPE_CHECKING:
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.runner.analysis import Results


COMMANDS: Mapping[str, Any] = document(DATA / "commands.yaml")
COUNTED = {option.name: option for option in COUNTING}
Groups = Mapping[str, "argparse._ArgumentGroup"]
"""Sections of a command's help, by their titles."""


def add_flags(parser: argparse.ArgumentParser, command: str, own_types: Mapping[str, Any], groups: Groups) -> None:
    """Add the flags and arguments of a command, by data/commands.yaml; `own_types` are types of the command's own."""
    types = {"path": Path, "count": positive, "counts": counts, "integer": int, **own_types}
    for name, row in COMMANDS[command]["flags"].items():
        options = {key: value for key, value in row.items() if key not in {"group", "hints"}}
        place: argparse._ActionsContainer = groups[row["group"]] if "group" in row else parser
        if "hints" in row:
            parser.set_defaults(hints=hints({"options": OPTIONS, "counting": COUNTING}[row["hints"]]))
        if "type" in row:
            options["type"] = types[row["type"]]
        place.add_argument(name, **options)


def results_dirs(options: argparse.Namespace) -> list[Path]:
    """Return the folders of --results-dir in order; none where the flag is absent."""
    return [path for several in options.results_dir or () for path in several]


def counted(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values that --set gives to the options of counting, probes as a list."""
    values: dict[str, Any] = {"probes": []}
    for name, text in (assignment(text, "warmup=10") for text in options.settings):
        option = COUNTED.get(name.replace("-", "_"))
        if option is None:
            fix = "\n".join([f"one of: {', '.join(COUNTED)}", *(f"{one.name}: {one.help}" for one in COUNTED.values())])
            raise ConfigError(f"--set has no {name!r:.40} here.", where="--set", fix=fix)
        value = option.read(text, f"--set {option.name}")
        if option.kind is Path:
            values[option.name].append(value)
        else:
            values[option.name] = value
    return values


def varying_traits(text: str | None) -> tuple[str, ...]:
    """Parse a list of traits."""
    from tprimat.analyze.traits import TRAITS

    names = [part.strip().lower().replace("_", "-").replace(" ", "-") for part in (text or "").split(",") if part.strip()]
    if wrong := [name for name in names if name not in TRAITS]:
        raise ConfigError(f"There is no trait {wrong[0][:40]!r}.", where="--varying", fix=f"one of {', '.join(TRAITS)}")
    return tuple(dict.fromkeys(names))


def metric_options(options: argparse.Namespace) -> "MetricOptions":
    """Return how --set wants metrics counted. Raises ConfigError: a value does not fit its option."""
    from tprimat.analyze.metrics import MetricOptions

    values = {"flops_convention" if name == "flops" else name: value for name, value in counted(options).items()}
    del values["probes"]
    return MetricOptions(**values)


def read(
    options: argparse.Namespace, paths: Sequence[Path], metrics: "MetricOptions | None" = None, *, to_share: bool = False
) -> "Results":
    """Read the results under the paths that the user names, else in the usual folders; name on stderr what was skipped."""
    from tprimat.records.discover import WHAT_A_RESULT_IS
    from tprimat.runner.analysis import by_folder, configured_prices, read_results, result_folders

    values, named, paths = counted(options), bool(paths), paths or result_folders()
    counting = metrics or metric_options(options)
    results = read_results(paths, counting, configured_prices(), values["probes"], to_share=to_share)
    if named:
        results = by_folder(results, paths)
    if missing := [str(path) for path in paths if not path.exists()] if not results.measured else []:
        fix = (
            "./benchmark.py writes results to ./output; make demo compares recorded ones; "
            "or name a folder that holds run.json or benchmark_*.json files"
        )
        raise RecordError(f"There is no file or folder {missing[0]}.", where=", ".join(missing), fix=fix)
    for problem in results.problems:
        print(f"skipped: {problem}", file=sys.stderr)
    unread = len(results.problems)
    if unread:
        print(f"{unread} of {unread + len(results.measured)} results skipped", file=sys.stderr)
    if not results.measured:
        why = None if unread else WHAT_A_RESULT_IS
        way_out = "./benchmark.py writes results to ./output; ./extract_primus_metrics.py makes one from a log"
        raise RecordError("No result could be read.", where=", ".join(map(str, paths)), why=why, fix=way_out)
    return results


def print_json(document: object) -> None:
    """Print one JSON document, with null for NaN and infinity; of 8,000 layouts in a tenth of the time that json takes."""
    from pydantic_core import to_json

    print(to_json(document, indent=2, inf_nan_mode="null").decode())


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """Say on a terminal what is being done, until it is done."""

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)

    say(text)
    try:
        yield
    finally:
        say("")


def fraction(text: str, flag: str, example: str = "3% or 0.03") -> float:
    """Parse '3%' or '0.03' as 0.03."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"{flag} is {text!r}.", where=flag, why="It takes a fraction or a percentage up to 100 %.", fix=example)
    return value


def positive(text: str) -> int:
    """Parse a count, for argparse."""
    try:
        return count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} {str(error).rstrip('.').replace('It takes', 'is not')}") from error


def counts(text: str) -> tuple[int, ...]:
    """Parse '1,2,4', each number once, for argparse."""
    return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))
