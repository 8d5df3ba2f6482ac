"""What an engine is: two pure functions, from a plan to a command and from a line of its log to fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tprimat.logs.fields import LineFields
from tprimat.plan.schema import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start."""

    argv: tuple[str, ...]
    ranks_per_node: int | None = None
    """argv is a Python script with its arguments, to be started by torchrun this many times on each node.

    None: argv is a whole command line.
    """
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the parent's environment."""
    directory: str | None = None
    """Working directory; None: the parent's."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> text to write before the start, such as a generated experiment file."""


class Engine(Protocol):
    """One framework that can be started."""

    name: str

    def command(self, plan: RunPlan) -> Command:
        """The exact process that carries out the plan. Pure: touches no file and no device."""
        ...

    def read_line(self, text: str) -> LineFields | None:
        """What a line of the log says; None for lines that say nothing."""
        ...
