"""A parser whose complaints are one line each and name what was probably meant."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from tprimat import __version__

RESULTS = {"results", "folders", "reference"}
"""Positional arguments that are folders of results."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints no usage with a complaint: --help has it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.add_argument("--version", action="version", version=f"tprimat {__version__}", help="print the version and exit")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse a command line; exit with status 2 where it is wrong."""
        self._refuse_results_dir(sys.argv[1:] if args is None else args)
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return options

    def _refuse_results_dir(self, words: Sequence[str]) -> None:
        """Refuse the flag where folders of results are given by position, before such a word is called missing."""
        places = [action for action in self._actions if not action.option_strings]
        used = any(word.partition("=")[0] == "--results-dir" for word in words)
        if used and "--results-dir" not in self._option_string_actions and places and places[0].dest in RESULTS:
            order = " ".join(str(action.metavar or action.dest.upper()) for action in places)
            self.error(f"leave out --results-dir and name the folders alone: {self.prog} {order}")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one word too many"
        return f"there is no flag {word}{did_you_mean(word, self._option_string_actions)}"

    def error(self, message: str) -> NoReturn:
        """Print one line, and exit with status 2."""
        choice = re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            name, given, known = choice[1], choice[2], choice[3].replace("'", "").split(", ")
            message = f"{name} cannot be {given!r}{did_you_mean(given, known) or '; one of: ' + ', '.join(known)}"
        message = re.sub(r"'([^']{80})[^']{40,}'", r"'\1...'", message.removeprefix("argument "))
        self.exit(2, f"error: {message} ({self.prog} --help)\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean --model?', or an empty text where nothing is similar."""
    names = list(known)
    begun = [name for name in names if len(word) > 3 and name.startswith(word)]
    close = begun or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""
