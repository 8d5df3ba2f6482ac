"""What a terminal can show: its width, and colour where a word means that something won, was refused or needs care.

A pipe, a file and NO_COLOR get plain text; a pipe and a file also get every column.
"""

import textwrap
from dataclasses import dataclass
from typing import Literal, TextIO

Meaning = Literal["winner", "refused", "warning", "quiet", "heading"]
STYLES: dict[Meaning, str] = {
    "winner": "bold green",
    "refused": "red",
    "warning": "yellow",
    "quiet": "dim",
    "heading": "bold",
}
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
        if not self.colour or not text:
            return text
        from rich.color import ColorSystem
        from rich.style import Style

        return Style.parse(STYLES[meaning]).render(text, color_system=ColorSystem.STANDARD)

    def prose(self, text: str, indent: int = 0, meaning: Meaning | None = None) -> str:
        """Break a line between words; lines after the first are indented. Paths and commands stay whole."""
        if self.width is not None:
            fitting = textwrap.wrap(
                text, self.width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
            )
            text = "\n".join(fitting)
        return text if meaning is None else "\n".join(self.paint(line, meaning) for line in text.split("\n"))


PLAIN = Screen()


def screen_of(stream: TextIO | None) -> Screen:
    """Return what a stream can show: PLAIN unless it is a terminal."""
    if stream is None or not stream.isatty():
        return PLAIN
    from rich.console import Console

    console = Console(file=stream)
    return Screen(width=max(console.width, NARROWEST), colour=bool(console.color_system) and not console.no_color)
