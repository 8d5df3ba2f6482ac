"""The options of a run, one row each: flags, `--set`, `--sweep`, the words of a stored command and the help come from them.

Commands that do something else have their own flags in their own files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tprimat.core.errors import ConfigError
from tprimat.core.rows import DATA, document

WHAT, WORKLOAD = "what to run", "workload"
MOST = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option: `--set NAME=VALUE` has it, `--sweep NAME=A,B` mostly, and some commands have a flag of its name."""

    name: str
    help: str
    metavar: str = "N"
    group: str = WHAT
    commands: tuple[str, ...] = ()
    key: str | None = None
    """In the configuration; PLATFORM is the one that runs, STRATEGY and MODEL are those of the run. None: in none."""
    choices: tuple[str, ...] = ()
    kind: Callable[[str], Any] = str
    """Makes the value, or raises ValueError; a Path may be given several times."""
    swept: bool = True
    field: str = ""
    """Of the request, where it has another name."""

    @property
    def flag(self) -> str:
        """What users type before the value: --steps, or --set seed."""
        return f"--{self.name.replace('_', '-')}" if self.commands else f"--set {self.name}"

    def read(self, text: str, origin: str) -> Any:
        """Return the value that a text stands for, or refuse it; `origin` is what was typed before it."""
        if self.choices and text not in self.choices:
            raise ConfigError(f"{origin} is {text[:40]!r}.", where=origin, fix=f"one of: {', '.join(self.choices)}")
        try:
            return self.kind(text)
        except ValueError as error:
            raise ConfigError(f"{origin} is {text[:40]!r}.", where=origin, why=str(error)) from error


def count(text: str, most: int = MOST) -> int:
    """Read a whole number from 1 on."""
    if not text.isdecimal() or len(text) > len(str(MOST)) or not 1 <= int(text) <= most:
        raise ValueError(f"It takes a whole number from 1 to {most:,}.")
    return int(text)


def steps(text: str) -> int | str:
    """Read a number of steps, or auto."""
    if text == "auto":
        return text
    if not text.isdecimal() or len(text) > len(str(MOST)):
        raise ValueError("It takes a whole number, or auto.")
    return int(text)


def price(text: str) -> float:
    """Read a price."""
    value = float(text)
    if not 0 < value <= 1e9:
        raise ValueError("It takes a price such as 2.50.")
    return value


KINDS: Mapping[str, Any] = {"count": count, "runs": partial(count, most=1000), "steps": steps, "price": price, "path": Path}


def _read(section: str) -> tuple[Option, ...]:
    rows: list[dict[str, Any]] = document(DATA / "options.yaml")[section]
    for row in rows:
        row["kind"] = KINDS[row["kind"]] if "kind" in row else str
        row["choices"], row["commands"] = (tuple(row.get(key, ())) for key in ("choices", "commands"))
    return tuple(Option(**row) for row in rows)


OPTIONS, COUNTING = _read("options"), _read("counting")
"""Of a run; and how analyses count."""
BY_NAME = {option.name: option for option in OPTIONS}
DEGREES = tuple(BY_NAME[name] for name in ("tp", "pp", "vpp", "cp", "ep"))


def option_of(field: str) -> Option:
    """Return the option of a field of the request."""
    return next(option for option in OPTIONS if field in {option.field, option.name})


def assignment(text: str, example: str) -> tuple[str, str]:
    """Split the NAME=VALUE of --set, or refuse it with an example."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"--set {text} is not KEY=VALUE.", where="--set", fix=f"--set {example}")
    return name.strip(), value


def hints(options: tuple[Option, ...]) -> dict[str, str]:
    """Return what to type in place of flags that do not exist, flag by flag."""
    return {f"--{option.name.replace('_', '-')}": f"--set {option.name}={option.metavar}" for option in options}


def names_listed(options: tuple[Option, ...]) -> str:
    """Return names and help of the options that only --set has, for the end of a command's help."""
    rows = [(f"{option.name}={option.metavar}", option.help) for option in options if not option.commands]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def removed() -> Mapping[str, str]:
    """Return what to do instead of commands, flags, and the last two words of keys that older scripts may have."""
    names: Mapping[str, str] = document(DATA / "removed.yaml")["removed"]
    return names
