"""Errors that a user can fix, described by what, where, why, and what to try."""

from collections.abc import Callable
from typing import TypeVar

Error = TypeVar("Error", bound="UserError")

WORKER_ERROR = "tprimat error: "
"""Begins a rank's own error in the log of a run, which has lines `error: ...` of many programs."""


class UserError(Exception):
    """A mistake that the user can fix. The command line prints it without a traceback and exits 2; most functions may raise one.

    `what` is one sentence that names the offending thing and its value; `where` its place in a file or on the command line, such
    as "config.yaml:84 parallelism.tensor"; `why` the rule that is broken; `fix` what to try, concrete enough to copy.
    """

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def with_texts(self: Error, change: Callable[[str], str]) -> Error:
        """Return the same error with each of its texts changed, such as a path in it."""
        where, why, fix = (text and change(text) for text in (self.where, self.why, self.fix))
        return type(self)(change(self.what), where=where, why=why, fix=fix)

    def __str__(self) -> str:
        parts = (("at", self.where), ("why", self.why), ("try", self.fix))
        rows = (f"  {label:<5} " + text.replace("\n", "\n" + " " * 8) for label, text in parts if text)
        return "\n".join([self.what, *rows])


class ConfigError(UserError):
    """The configuration, a flag or an environment variable asks for something that cannot be."""


class MissingLayoutError(ConfigError):
    """A strategy has no layout for a model or a platform: the others can still run."""


class LayoutError(ConfigError):
    """The model, the batch or the ranks cannot be split as asked."""


class RecordError(UserError):
    """A result file is missing, damaged, or not what its schema says."""


class MetricError(UserError):
    """A metric cannot be computed from what was measured."""


class LaunchError(UserError):
    """A run cannot be started here: no such program, no such engine, no room, no permission."""
