"""The command `tprimat`, and the one place where every command starts and ends.

A command is a function `(options) -> int`: `run` of its module, or one of its name in the module that data/commands.yaml names.
Its description and its flags are rows there. Where some are options of a run, `add_arguments(parser, name)` adds all of them.
"""

import argparse
import difflib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from tprimat import __version__
from tprimat.cli.common import COMMANDS, add_flags
from tprimat.config.options import removed
from tprimat.core.errors import ConfigError, UserError

# A parser whose complaints are one line each and name what was probably meant.


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints no usage with an error: --help has it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.add_argument("--version", action="version", version=f"tprimat {__version__}", help="print the version and exit")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse a command line; exit with status 2 where it is wrong."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return options

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            flags = self._option_string_actions
            meant = [f"{flag} {word}" for flag in ("--results-dir", "--model", "--parallel") if flag in flags]
            return f"unexpected argument {word!r}" + (f"; did you mean {' or '.join(meant)}?" if meant else "")
        if word in removed():
            return f"{word} is gone; instead: {removed()[word]}"
        if instead := (self.get_default("hints") or {}).get(word):
            return f"there is no flag {word} here; instead: {instead}"
        return f"there is no flag {word}{did_you_mean(word, self._option_string_actions)}"

    def error(self, message: str) -> NoReturn:
        """Print one line, and exit with status 2."""
        choice = re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            name, given, known = choice[1], choice[2], choice[3].replace("'", "").split(", ")
            gone = removed().get(given) if name == "COMMAND" else None
            message = f"{name} cannot be {given!r}{did_you_mean(given, known) or '; one of: ' + ', '.join(known)}"
            message = f"{given} is gone; instead: {gone}" if gone else message
        message = re.sub(r"'([^']{80})[^']{40,}'", r"'\1...'", message.removeprefix("argument "))
        self.exit(2, f"error: {message} ({self.prog} --help)\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean --model?', or an empty text where nothing is similar."""
    names = list(known)
    begun = [name for name in names if len(word) > 3 and name.startswith(word)]
    close = begun or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


# How a command starts and ends.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0 success, 1 a failed run or a bad file, 2 the user's mistake, 130 Ctrl-C, 143 SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    listing = "\n".join(f"  {name:<14}{row['summary']}" for name, row in COMMANDS.items())
    parser = Parser(
        prog="tprimat",
        description="Find which parallelism strategy trains an LLM fastest here, how close to the limit, and how sure that is.",
        epilog=f"commands:\n{listing}\n\ntprimat COMMAND --help describes a command.",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    if not words:
        parser.print_help(sys.stderr)
        return 2
    name = parser.parse_args(words[:1]).command
    return start(name, os.environ.pop("TPRIMAT_SCRIPT", f"tprimat {name}"), words[1:], suggest=True)


def start(name: str, prog: str, arguments: Sequence[str] | None = None, *, suggest: bool = False) -> int:
    """Run one command to its end, and return its exit status.

    `suggest` names the next command on a terminal: for the command that the user typed, not for one that it calls.
    """
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        check_words(words)
        options = parser_of(name, prog).parse_args(words, argparse.Namespace(words=words))
        status: int = getattr(module_of(name), name if "module" in COMMANDS[name] else "run")(options)
        if suggest and not status and all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)):
            following = shlex.join(map(str, NEXT[name](options))) if name in NEXT else ""
            if 0 < len(following) < 100:  # several folders, as of make demo, are no hint
                print(f"\nnext: python3 -m tprimat {following}", file=sys.stderr)
    except UserError as error:
        from tprimat.report.tables import screen_of

        screen = screen_of(sys.stderr)
        print("\n".join(screen.prose(line, 8) for line in f"error: {error}".split("\n")), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tprimat":
            raise
        print(f"error: The Python module {error.name} is not installed for {sys.executable}.", file=sys.stderr)
        print("  try   make install, or pip install -r requirements.txt", file=sys.stderr)
        return 2
    return status


NEXT: dict[str, Callable[[argparse.Namespace], Sequence[object]]] = {
    "run": lambda options: () if options.dry_run else ("compare", "--results-dir", options.output_dir or "output"),
    "explain": lambda options: ("compare", "--results-dir", options.run, "--published"),
    "compare": lambda options: ("report", *itertools.chain.from_iterable(options.results_dir or [["output"]])),
    "report": lambda options: ("archive", *options.results, "results.tar.gz"),
    "models": lambda options: ("plan", "--model", "llama", "--gpu", "H100 SXM", "--gpus", 8),
    "doctor": lambda options: ("run", "--dry-run"),
    "validate": lambda options: ("run", "--dry-run"),
}
"""Command -> the words of the one that most users want after it; none where its own options say what is wanted."""


def module_of(name: str) -> Any:
    """Return the module of a command."""
    return import_module(f"tprimat.cli.{COMMANDS[name].get('module', name)}")


def check_words(words: Sequence[str]) -> None:
    """Refuse words that no flag can mean, before a default takes their place."""
    former = ""
    for word in words:
        flag, assigned, value = word.partition("=") if word.startswith("--") else ("", "", word)
        place = flag or (former if former.startswith("-") else "the command line")
        former = word
        if not value and (assigned or not word):
            fix = "leave it out, or give it a value"
            raise ConfigError(f"{place} is empty.", where=place, why="An unset variable leaves an empty word.", fix=fix)
        if any("\ud800" <= character <= "\udfff" for character in word):
            shown = word.encode("utf8", "surrogateescape").decode("utf8", "backslashreplace")
            raise ConfigError(f"{shown} is not UTF-8 text.", where=place, fix="rename it, or choose another one")


def parser_of(name: str, prog: str) -> Parser:
    """Return a command's parser."""
    module = module_of(name)
    parser = Parser(prog=prog, description=COMMANDS[name]["description"])
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser, name)
    else:
        add_flags(parser, name, getattr(module, "TYPES", {}), {})
    return parser
