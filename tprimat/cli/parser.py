"""A parser whose complaints are one line each and name what was probably meant."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from tprimat import __version__


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints no usage with a complaint: --help has it."""

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
