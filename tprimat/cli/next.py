"""Suggest the command that a user probably wants next."""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

FAILED = "doctor"
INTERRUPTED = 130


def _after_run(options: argparse.Namespace, status: int) -> str | None:
    output = options.output_dir or "output"
    if options.dry_run:
        if options.platform is not None:
            return None  # the plan may be of another machine than this one
        return _join(["run", *(word for word in sys.argv[1:] if word not in {"--dry-run", "--json", "run"})])
    if options.plan is not None:
        return None  # what to run is in the answer
    if status == INTERRUPTED:
        again = [] if options.resume else ["--resume"]
        return _join(["run", *(word for word in sys.argv[1:] if word != "run"), *again])
    if status and (options.archive or options.report or options.probe):
        return None  # the message has said what to try
    if options.archive:
        return _join(["compare", "--results-dir", options.archive])
    if options.report:
        return _join(["archive", output, "results.tar.gz"])
    if options.probe:
        return _join(["run", "--output-dir", output])
    if options.scaling:
        return _join(["report", *sorted(map(str, Path(output).glob("gpus-*")))])
    return None if status else _join(["compare", "--results-dir", output])  # a failed run has said what to try


def _after_sweep(options: argparse.Namespace, status: int) -> str | None:
    return _join(["compare", "--results-dir", *_folders()]) if _folders() else FAILED


def _after_compare(options: argparse.Namespace, status: int) -> str | None:
    return _join(["report", *(_named(options) or ["output"])])


def _after_peak(options: argparse.Namespace, status: int) -> str | None:
    if status:
        return None
    named = _named(options)
    if options.picture:
        return _join(["report", *(named or _folders() or ["output"])])
    return _join(["peak", "--picture", *(["--results-dir", *named] if named else [])])


def _named(options: argparse.Namespace) -> list[str]:
    """Return what --results-dir names."""
    return [str(path) for several in options.results_dir or () for path in several]


def _after_extract(options: argparse.Namespace, status: int) -> str | None:
    if status:
        return None
    folder = options.output.parent if options.output else Path() if options.log_file == "-" else Path(options.log_file).parent
    return _join(["compare", "--results-dir", str(folder)])


def _after_report(options: argparse.Namespace, status: int) -> str | None:
    return None if status else _join(["archive", *map(str, options.results or ["output"]), "results.tar.gz"])


def _folders() -> list[str]:
    return sorted(str(path) for path in Path().glob("output-[0-9][0-9]") if path.is_dir())


def _join(words: Iterable[str]) -> str:
    return shlex.join(list(words))


NEXT: dict[str, Callable[[argparse.Namespace, int], str | None]] = {
    "run": _after_run,
    "sweep": _after_sweep,
    "compare": _after_compare,
    "peak": _after_peak,
    "scaling": lambda options, status: _join(["report", *map(str, options.results)]) if options.results else None,
    "report": _after_report,
    "extract": _after_extract,
    "probe": lambda options, status: FAILED if status else _join(["run", "--output-dir", str(options.output)]),
    "models": lambda options, status: _join(["plan", "--accelerator", "H100 SXM", "--gpus", "8"]),
    "doctor": lambda options, status: None if status else "run --dry-run",
    "validate": lambda options, status: None if status else "run --dry-run",
    "archive": lambda options, status: _join(["compare", "--results-dir", str(options.output)]),
}
"""Command -> what comes next, as a command of tprimat with its flags; None where nothing does."""


def suggestion(name: str, options: argparse.Namespace, status: int, commands: dict[str, str]) -> str | None:
    """Return the next command as this user would type it, and what it does.

    `commands` maps names to summaries, with the script in brackets where there is one.
    """
    words = NEXT[name](options, status) if name in NEXT else None
    if words is None:
        return None
    following, _, flags = words.partition(" ")
    summary, _, script = commands[following].partition(" (./")
    program = Path(sys.argv[0])
    if program.name == "tprimat":
        start = f"tprimat {following}"
    elif script:
        folder = Path() if program.name == "__main__.py" else program.parent
        start = f"{'.' if folder == Path() else folder}/{script.rstrip(')')}"
    else:
        start = f"python3 -m tprimat {following}"
    return f"next: {start} {flags}".rstrip() + f"   {summary}"
