"""Ctrl-C, SIGTERM and SIGHUP to the launcher, turned into something that a loop can ask about."""

import os
import re
import selectors
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import BinaryIO, cast

from tprimat.engines.base import Command
from tprimat.errors import LaunchError
from tprimat.launch import process_tree
from tprimat.launch.process_tree import Stop
from tprimat.launch.reaper import Guard
from tprimat.launch.schema import Limits
from tprimat.logs.failures import Failure

WANTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the signals that ask for an end while it is entered; puts the former handlers back afterwards.

    SIGHUP stays ignored where it was, which is how nohup works. Outside the main thread Python allows no handlers: there it
    counts nothing, and whoever started the thread has to stop the run.
    """

    def __init__(self) -> None:
        self.count = 0
        self.name: str | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in WANTED:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._former[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave us

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.name = self.name or signal.Signals(number).name


# What a run prints: to the log files byte by byte, and to whoever watches line by line.

TAIL_LINES = 20_000
"""Kept for the classification of a failure: the tracebacks of a few hundred ranks."""
LONGEST_LINE = 1 << 20
"""Bytes. What is longer comes in parts, so that binary output cannot fill the memory."""
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A progress bar ends its line with \\r alone. A \\r at the end of a chunk waits for the \\n that may follow."""


class Output:
    """Takes bytes as they come.

    A log that cannot be written is mentioned once and never stops the run: the measurements do not depend on it.
    """

    def __init__(self, logs: Sequence[Path], on_line: Callable[[str], None], on_notice: Callable[[str], None]) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._on_notice = on_notice
        self._pending = b""
        self._files: dict[Path, BinaryIO] = {}
        self._complained: set[Path] = set()
        for path in dict.fromkeys(logs):
            self._open(path)

    def note(self, text: str) -> None:
        """Lines of ours, for the logs only."""
        self._write_all("".join(f"{line}\n" for line in text.splitlines()).encode())

    def feed(self, chunk: bytes) -> None:
        """Some bytes of output."""
        self._write_all(chunk)
        *lines, self._pending = LINE_END.split(self._pending + chunk)
        for line in lines:
            self._line(line)
        if len(self._pending) > LONGEST_LINE:
            self._flush()

    def close(self) -> None:
        """No more output: the last line counts also without its end."""
        self._flush()
        for file in self._files.values():
            file.close()

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("ab", buffering=0)
        except OSError as error:
            self._complain(path, error)

    def _write_all(self, data: bytes) -> None:
        for path, file in self._files.items():
            self._write(path, file, data)

    def _write(self, path: Path, file: BinaryIO, chunk: bytes) -> None:
        try:
            written = file.write(chunk)
            while written < len(chunk):  # a disk that is filling up takes a part, and refuses the rest
                written += file.write(chunk[written:])
        except OSError as error:
            self._complain(path, error)

    def _complain(self, path: Path, error: OSError) -> None:
        if path not in self._complained:
            self._complained.add(path)
            self._on_notice(f"the log {path} cannot be written ({error.strerror or error}); the run goes on without it.")

    def _flush(self) -> None:
        line, self._pending = self._pending.removesuffix(b"\r"), b""
        self._line(line)

    def _line(self, raw: bytes) -> None:
        if raw:
            text = raw.decode("utf8", errors="replace")
            self.tail.append(text)
            self._on_line(text)


# Ending a run: ask, wait, insist, and leave nobody behind.


# One child process: started in a session of its own, read to its last byte, and ended with all its descendants.

TICK_SECONDS = 0.1
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a child ended."""

    exit_code: int | None
    """Minus the signal's number where a signal ended it; None where nothing could end it."""
    duration_seconds: float
    stopped: Failure | None
    """Why we ended it; None: it ended by itself."""
    given_up: frozenset[int] = frozenset()
    """Pids that not even SIGKILL ended."""


class Child:
    """A started command. Its stdout and stderr are one stream; its stdin is empty, so that no framework waits for an answer."""

    def __init__(self, command: Command, grace_seconds: float) -> None:
        self.mark = uuid.uuid4().hex
        write_files(command)
        try:
            self._process = subprocess.Popen(
                command.argv,
                cwd=command.directory,
                env={**os.environ, **command.environment, process_tree.MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise cannot_start(command, error) from error
        self._output = cast("BinaryIO", self._process.stdout)  # a pipe was asked for
        self._guard = Guard(self.mark, self._process.pid, grace_seconds)

    def root(self) -> int | None:
        """The pid of the first process, None once it has ended."""
        return self._process.pid if self._process.poll() is None else None

    def members(self) -> set[int]:
        """The pids of all processes that belong to it."""
        return process_tree.members(self.mark, self.root())

    @property
    def output_descriptor(self) -> int:
        """To read from."""
        return self._output.fileno()

    def close(self) -> int | None:
        """After the last process is gone.

        Returns:
            the exit code of the first process; None where it could not be ended.
        """
        self._guard.dismiss()
        self._output.close()
        return self._process.poll()


def write_files(command: Command) -> None:
    """The files that a command needs beside it.

    Raises:
        LaunchError: one cannot be written.
    """
    try:
        for name, text in command.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, encoding="utf8")
    except OSError as error:
        raise LaunchError(f"{error.filename} cannot be written: {error.strerror or error}.", where=str(error.filename)) from error


def cannot_start(command: Command, error: OSError) -> LaunchError:
    """The error for a program that the operating system does not start."""
    if command.directory is not None and not Path(command.directory).is_dir():
        return LaunchError(f"The folder {command.directory} to start in does not exist.", where=command.directory)
    return LaunchError(
        f"{command.argv[0]} cannot be started: {error.strerror or error}.",
        where=command.argv[0],
        fix="install it, or name its folder in PATH",
    )


class Supervision:
    """One child from its start to the end of its last process."""

    def __init__(self, child: Child, output: Output, limits: Limits, interrupts: Interrupts) -> None:
        self._child = child
        self._output = output
        self._limits = limits
        self._interrupts = interrupts
        self._stop: Stop | None = None
        self._stopped: Failure | None = None
        self.began = time.monotonic()

    def run(self, tick: Callable[[float], Failure | None], before_stop: Callable[[Failure], None]) -> Ending:
        """Until nobody is left.

        Args:
            tick: called about ten times a second with the time; a Failure asks for a stop.
            before_stop: called once with that Failure while all processes still stand.
        """
        try:
            self._watch(tick, before_stop)
        finally:
            self._leave_nobody()
            code = self._child.close()
        tick(time.monotonic())
        given_up = frozenset(self._stop.given_up if self._stop else ())
        return Ending(exit_code=code, duration_seconds=time.monotonic() - self.began, stopped=self._stopped, given_up=given_up)

    def _watch(self, tick: Callable[[float], Failure | None], before_stop: Callable[[Failure], None]) -> None:
        with selectors.DefaultSelector() as selector:
            descriptor = self._child.output_descriptor
            selector.register(descriptor, selectors.EVENT_READ)
            ticked = 0.0
            while self._stop is None or not self._stop.advance():
                self._read(selector, descriptor)
                now = time.monotonic()
                if now - ticked < TICK_SECONDS:
                    continue
                ticked = now
                verdict = tick(now)
                if verdict is not None and self._stop is None:
                    before_stop(verdict)
                    self._begin_stop(verdict)
                self._obey()
            self._drain(selector, descriptor)

    def _leave_nobody(self) -> None:
        """Normally there is nobody; after an error of ours the run must not stay behind either."""
        if (self._stop is None or not self._stop.given_up) and self._child.members():
            stop = Stop(self._child.mark, self._child.root, grace_seconds=0.0)
            while not stop.advance():
                time.sleep(TICK_SECONDS / 2)

    def _obey(self) -> None:
        """Signals to the launcher, and the end of the first process: whoever it left behind is ended too."""
        if self._interrupts.count and self._stopped is None:
            cause = f"Stopped by {self._interrupts.name}."
            self._begin_stop(Failure(outcome="interrupted", cause=cause))
        if self._interrupts.count > 1 and self._stop is not None:
            self._stop.kill()
        if self._stop is None and self._child.root() is None:
            self._stop = Stop(self._child.mark, self._child.root, self._limits.grace_seconds)

    def _begin_stop(self, why: Failure) -> None:
        if self._stop is None:
            self._stopped = why
            self._stop = Stop(self._child.mark, self._child.root, self._limits.grace_seconds)

    def _read(self, selector: selectors.BaseSelector, descriptor: int) -> bool:
        """One chunk of output, waiting a moment for it; False when there is none."""
        if not selector.get_map():  # closed by the child, which may go on without it
            time.sleep(TICK_SECONDS / 2)
            return False
        if not selector.select(TICK_SECONDS / 2):
            return False
        chunk = os.read(descriptor, CHUNK_BYTES)
        if chunk:
            self._output.feed(chunk)
        else:
            selector.unregister(descriptor)
        return bool(chunk)

    def _drain(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        """What the processes wrote before they ended. Whoever still holds the pipe is none of ours: it is not waited for."""
        while selector.get_map() and self._read(selector, descriptor):
            pass
        self._output.close()
