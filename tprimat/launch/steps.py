"""Where the steps of a run come from: the worker's steps.jsonl, or the lines of its log."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tprimat.errors import RecordError
from tprimat.record.files import from_json
from tprimat.record.schema import StepRecord
from tprimat.record.store import RunDirectory


class StepSource(Protocol):
    """Gives each step once, in the order of its end."""

    def on_line(self, text: str) -> None:
        """A line of the log went by."""
        ...

    def poll(self) -> list[StepRecord]:
        """The steps since the last call."""
        ...


class WrittenSteps:
    """Follows a steps.jsonl that a worker appends to. A line that is not whole yet is left for the next call."""

    def __init__(self, path: Path, on_notice: Callable[[str], None]) -> None:
        self._path = path
        self._on_notice = on_notice
        self._offset = path.stat().st_size if path.exists() else 0

    def on_line(self, text: str) -> None:
        """Nothing: the log is for people here."""

    def poll(self) -> list[StepRecord]:
        """The steps since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [step for line in whole.splitlines() if (step := self._read(line)) is not None]

    def _read(self, line: bytes) -> StepRecord | None:
        try:
            return from_json(StepRecord, line, where=str(self._path))
        except RecordError as error:
            self._on_notice(f"a line of {self._path} is passed over: {error.why or error.what}")
            return None


class LoggedSteps:
    """Makes steps.jsonl from the log."""

    def __init__(
        self, directory: RunDirectory, step_of_line: Callable[[str], StepRecord | None], on_notice: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._step_of_line = step_of_line
        self._on_notice = on_notice
        self._new: list[StepRecord] = []
        self._unwritten: list[StepRecord] = []
        self._complained = False

    def on_line(self, text: str) -> None:
        """A line of the log, which may say something about a step."""
        step = self._step_of_line(text)
        if step is not None:
            self._new.append(step)
            self._unwritten.append(step)

    def poll(self) -> list[StepRecord]:
        """The steps since the last call, which also stand in steps.jsonl unless the disk is full; then it is tried again."""
        try:
            while self._unwritten:
                self._directory.append_step(self._unwritten[0])
                del self._unwritten[0]
        except RecordError as error:
            if not self._complained:
                self._complained = True
                self._on_notice(error.what)
        fresh, self._new = self._new, []
        return fresh
