"""What a terminal can show: its width, and colour where a word means that something won, was refused or needs care.

A pipe, a file and NO_COLOR get plain text; a pipe and a file also get every column.
"""

import os
import textwrap
from dataclasses import dataclass
from typing import Literal, TextIO

Meaning = Literal["winner", "refused", "warning", "quiet", "heading"]
STYLES: dict[Meaning, str] = {"winner": "1;32", "refused": "31", "warning": "33", "quiet": "2", "heading": "1"}
"""Codes of ANSI's select graphic rendition."""
NARROWEST = 80
"""Columns for which tables are made; a narrower terminal wraps them."""


class Painted(str):
    """Text of a table with a meaning, which a screen with colour shows."""

    __slots__ = ("meaning",)
    meaning: Meaning

    def __new__(cls, text: str, meaning: Meaning) -> "Painted":
        """Return the text with its meaning."""
        made = super().__new__(cls, text)
        made.meaning = meaning
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What text is made for."""

    width: int | None = None
    """Columns; None for a pipe or a file, which hold everything."""
    colour: bool = False

    def paint(self, text: str, meaning: Meaning) -> str:
        """Colour a text by what it means."""
        return f"\x1b[{STYLES[meaning]}m{text}\x1b[0m" if self.colour and text else text

    def prose(self, text: str, indent: int = 0, meaning: Meaning | None = None) -> str:
        """Break a line between words; lines after the first are indented. Paths and commands stay whole."""
        lines = [text]
        if self.width is not None:
            lines = textwrap.wrap(
                text, self.width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
            )
        return "\n".join(lines if meaning is None else (self.paint(line, meaning) for line in lines))


PLAIN = Screen()


def screen_of(stream: TextIO | None) -> Screen:
    """Return what a stream can show: PLAIN unless it is a terminal."""
    if stream is None or not stream.isatty():
        return PLAIN
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        width = NARROWEST
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return Screen(width=max(width, NARROWEST), colour=colour)
