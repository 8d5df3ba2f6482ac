"""Start one command, read its output to the last byte, and end it with all its descendants."""

import contextlib
import importlib.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import Any, BinaryIO, ClassVar, cast

from tprimat.core.errors import LaunchError
from tprimat.engines.base import Command, engine_named
from tprimat.hardware.nodes import Nodes
from tprimat.launch import process_tree
from tprimat.launch.hang import RankRecord, Stack, save, take_records, take_stacks
from tprimat.launch.process_tree import Reaper, Shutdown
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Failure
from tprimat.records.store import write_atomically

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The last two are what schedulers send to warn of a time limit (sbatch --signal)."""
GRACE_SECONDS = 6.0
"""Between SIGTERM and SIGKILL. Ctrl-C is documented to end a run within 10 s."""
TICK_SECONDS = 0.1
CHUNK_BYTES = 1 << 16
SILENCE_SECONDS = 0.3
LISTEN_SECONDS = 3.0
"""For the stacks of one process, which come at once, and end."""
MAX_TAIL_LINES = 20_000
"""Kept to classify a failure: enough for the tracebacks of a few hundred ranks."""
MAX_LINE_BYTES = 1 << 20
"""Longer lines are split, so that binary output cannot fill the memory."""
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A progress bar ends its line with only \\r. A \\r at the end of a chunk may be followed by a \\n in the next one."""


class Interrupts:
    """Count STOP_SIGNALS inside a `with` block instead of dying; restore the handlers afterwards.

    A block inside another one counts on. An ignored SIGHUP stays ignored, so that nohup works. Python allows signal handlers in
    the main thread only.
    """

    seen: ClassVar[list[signal.Signals]] = []
    """Since the outermost block began."""

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    @property
    def first(self) -> signal.Signals | None:
        """The first signal."""
        return self.seen[0] if self.seen else None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not note_signal:
            self.seen.clear()
            for number in STOP_SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, note_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def note_signal(number: int, frame: FrameType | None) -> None:
    """Count a signal."""
    Interrupts.seen.append(signal.Signals(number))


class Output:
    """Copy a process's output to log files byte by byte, and pass it on line by line.

    A log that cannot be written is reported once and never stops the run, since the measurements do not depend on it.
    """

    def __init__(self, logs: Sequence[Path], on_line: Callable[[str], None], on_notice: Callable[[str], None]) -> None:
        self.tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        self._on_line = on_line
        self.notify = on_notice
        self._pending = b""
        self._files: dict[Path, BinaryIO] = {}
        for path in dict.fromkeys(logs):
            with self._reporting(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path] = cast("BinaryIO", path.open("ab", buffering=0))

    def write_to_logs(self, data: bytes) -> None:
        """Write to the log files only."""
        for path, file in list(self._files.items()):
            with self._reporting(path):
                rest = data
                while rest:  # a disk that is almost full takes a part and then refuses the rest
                    rest = rest[file.write(rest) :]

    def feed(self, chunk: bytes) -> None:
        """Take some bytes of output."""
        self.write_to_logs(chunk)
        *lines, self._pending = LINE_END.split(self._pending + chunk)
        for line in lines:
            self._emit(line)
        if len(self._pending) > MAX_LINE_BYTES:
            self._flush()

    def close(self) -> None:
        """Emit the last line, even without a line end, and close the logs."""
        self._flush()
        for file in self._files.values():
            file.close()

    @contextlib.contextmanager
    def _reporting(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if (file := self._files.pop(path, None)) is not None:
                file.close()
            self.notify(f"The log {path} cannot be written ({error.strerror or error}); the run continues without it.")

    def _flush(self) -> None:
        line, self._pending = self._pending.removesuffix(b"\r"), b""
        self._emit(line)

    def _emit(self, line: bytes) -> None:
        if line:
            text = line.decode("utf8", errors="replace")
            self.tail.append(text)
            self._on_line(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a command and its ranks ended on a node."""

    exit_code: int | None
    """Negative signal number if a signal ended it; None if it was not started, or nothing could end it."""
    stopped: Failure | None
    """Why it was stopped there, or could not be started; None if it ended by itself."""
    lines: tuple[str, ...] = ()
    stacks: tuple[Stack, ...] = ()
    collectives: tuple[RankRecord, ...] = ()


def bytecode_cache() -> dict[str, str]:
    """Return variables that keep Python's bytecode in ~/.cache/tprimat where an image has none, and keeps none.

    Every rank would compile all that it imports: on H100 that took 10.5 to 13.5 s a run, and 4 to 9 s with bytecode
    (`start_up` in records/h100/in-turn-four-gpus-later). Containers set PYTHONDONTWRITEBYTECODE, and uv writes no bytecode.
    """
    torch = importlib.util.find_spec("torch")
    folder = Path(torch.origin).parent if torch and torch.origin else None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - Path raises without a home
    if folder is None or not cache.is_absolute() or "PYTHONPYCACHEPREFIX" in os.environ or (folder / "__pycache__").exists():
        return {}
    if not os.environ.get("PYTHONDONTWRITEBYTECODE") and os.access(folder, os.W_OK):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "tprimat" / "bytecode")}


class Supervisor:
    """One command, from its start to the end of its last process; stdin is empty, so that no framework waits for an answer."""

    def __init__(
        self,
        command: Command,
        output: Output,
        interrupts: Interrupts,
        *,
        folder: Path | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Start the command; into `folder`, of the run, go the stacks of ranks that `tick` stops."""
        self._marker = uuid.uuid4().hex
        for name, text in command.files.items():
            write_atomically(Path(name), text)
        self._reaper = Reaper(self._marker, grace_seconds)
        try:
            self._process = subprocess.Popen(
                command.argv,
                cwd=command.directory,
                env={**os.environ, **bytecode_cache(), **command.environment, process_tree.MARKER: self._marker},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._reaper.dismiss()
            what, where, fix = f"{command.argv[0]} cannot be started: {error.strerror or error}.", command.argv[0], None
            if command.directory is not None and not Path(command.directory).is_dir():
                what, where = f"The working directory {command.directory} does not exist.", command.directory
            elif isinstance(error, FileNotFoundError):
                fix = "install it, or add its folder to PATH"
            raise LaunchError(what, where=where, fix=fix) from error
        self._reaper.tell(self._process.pid)
        self._pipe = cast("BinaryIO", self._process.stdout)  # not None with stdout=PIPE
        self._closed = False
        self._output = output
        self._folder = folder
        self._stacks: list[Stack] = []
        self._collectives: list[RankRecord] = []
        self._grace_seconds = grace_seconds
        self._interrupts = interrupts
        self._shutdown: Shutdown | None = None
        self._stopped: Failure | None = None
        self.began = monotonic()

    def run(self, tick: Callable[[float], Failure | None]) -> Ending:
        """Return when no process is left. `tick`, called about ten times a second with the time, may ask for a stop."""
        try:
            last_tick = 0.0
            while self._shutdown is None or not self._shutdown.advance():
                self._read()
                if (now := monotonic()) - last_tick < TICK_SECONDS:
                    continue
                last_tick = now
                verdict = tick(now)
                if verdict is not None and self._shutdown is None:
                    self._see_where_ranks_stand(verdict)
                    self._stop(verdict)
                self._check_signals_and_root()
            while not self._closed and self._read():  # what they wrote before they ended; a foreign process may hold the pipe
                pass
            self._output.close()
        finally:
            self._kill_remaining()
            process_tree.remove_leftovers(self._process.pid)
            self._reaper.dismiss()
            self._pipe.close()
        tick(monotonic())
        code, stacks, collectives = self._process.poll(), tuple(self._stacks), tuple(self._collectives)
        return Ending(exit_code=code, stopped=self._stopped, stacks=stacks, collectives=collectives)

    def _see_where_ranks_stand(self, why: Failure) -> None:
        if self._folder is None:
            return
        self._output.notify(f"{why.cause} Stopping it.")
        # A child of a rank has its number, too, and a later pid.
        pids = {rank: pid for pid in sorted(self._members(), reverse=True) if (rank := process_tree.rank_of(pid)) is not None}
        ranks = dict(sorted(pids.items()))
        self._collectives, self._stacks = take_records(ranks, self._folder), take_stacks(ranks, self._listen)
        if saved := save(self._stacks, self._folder / "stacks.txt"):
            self._output.notify(saved)

    def _root(self) -> int | None:
        return self._process.pid if self._process.poll() is None else None

    def _members(self) -> set[int]:
        return process_tree.members(self._marker, self._root())

    def _kill_remaining(self) -> None:
        """Kill what is left after an error in the launcher; normally there is nothing."""
        if self._shutdown is None and self._members():
            shutdown = Shutdown(self._marker, self._root, grace_seconds=0.0)
            while not shutdown.advance():
                sleep(TICK_SECONDS / 2)

    def _check_signals_and_root(self) -> None:
        if self._interrupts.first is not None and self._stopped is None:
            self._stop(Failure(outcome="interrupted", cause=f"Stopped by {self._interrupts.first.name}."))
        if len(self._interrupts.seen) > 1 and self._shutdown is not None:
            self._shutdown.kill()
        if self._shutdown is None and self._root() is None:
            self._stop(None)

    def _stop(self, why: Failure | None) -> None:
        if self._shutdown is None:
            self._stopped = why
            self._shutdown = Shutdown(self._marker, self._root, self._grace_seconds)

    def _listen(self) -> str:
        heard, ends, silent = b"", monotonic() + LISTEN_SECONDS, monotonic() + SILENCE_SECONDS
        while monotonic() < min(ends, silent):
            if chunk := self._read():
                heard, silent = heard + chunk, monotonic() + SILENCE_SECONDS
        return heard.decode("utf8", errors="replace")

    def _read(self) -> bytes:
        """Read one chunk of output, waiting briefly for it; empty where there was none."""
        if self._closed:  # the child closed its output and may go on without it
            sleep(TICK_SECONDS / 2)
            return b""
        if not select.select([self._pipe], [], [], TICK_SECONDS / 2)[0]:
            return b""
        chunk = os.read(self._pipe.fileno(), CHUNK_BYTES)
        if chunk:
            self._output.feed(chunk)
        self._closed = not chunk
        return chunk


DEFAULT_LIMIT_SECONDS = 900.0


def run_command(command: Command, on_line: Callable[[str], None], limit_seconds: float = DEFAULT_LIMIT_SECONDS) -> Ending:
    """Run a command until its last process has ended or the time limit has passed, and pass on its output line by line."""
    ends = time.monotonic() + limit_seconds

    def tick(now: float) -> Failure | None:
        return Failure(outcome="timed_out", cause=f"No end within {limit_seconds:.0f} s.") if now > ends else None

    with Interrupts() as interrupts:
        return Supervisor(command, Output((), on_line, on_line), interrupts).run(tick)


def run_ranks(module: str, arguments: Sequence[str], ranks: int, on_line: Callable[[str], None]) -> str | None:
    """Run a module under torchrun with one process per rank; return why the ranks failed, None where all ended well.

    Raises SystemExit: a signal asked for an end.
    """
    argv = (*torchrun(Nodes(), ranks), "-m", module, *arguments)
    with Interrupts() as interrupts:
        ending = run_command(Command(argv=argv, environment=python_environment(ranks)), on_line)
        if interrupts.first is not None:
            raise SystemExit(128 + interrupts.first)
    if ending.stopped:
        return ending.stopped.cause
    return f"torchrun ended with status {ending.exit_code}." if ending.exit_code else None


def python_environment(ranks: int = 1) -> dict[str, str]:
    """Return the variables with which a child finds this Python's modules and each rank gets a fair share of the cores."""
    cores = max(1, (os.cpu_count() or 1) // ranks)  # torchrun alone would give each rank one
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(cores)}


def command_on(plan: RunPlan, place: Nodes) -> Command:
    """Return the exact command that runs a plan on one of its nodes."""
    command = engine_named(plan.engine).command(plan)
    if command.ranks_per_node is None:
        return command
    return replace(command, argv=(*torchrun(place, command.ranks_per_node), *command.argv), ranks_per_node=None)


RENDEZVOUS = Path(__file__).with_name("rendezvous.py")
"""torchrun with a store that does not listen on every interface."""


def torchrun(nodes: Nodes, ranks_per_node: int) -> tuple[str, ...]:
    """Return the beginning of a command line that starts `ranks_per_node` Python processes on this node; the script follows."""
    start = (sys.executable, str(RENDEZVOUS), f"--nproc-per-node={ranks_per_node}", "--max-restarts=0")
    if nodes.count == 1:
        return (*start, "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=rank=0")
    endpoint = f"--rdzv-endpoint={nodes.master_address}:{nodes.master_port}"
    return (*start, f"--nnodes={nodes.count}", endpoint, f"--rdzv-conf=rank={nodes.rank}")


def free_port(address: str = "") -> int:
    """Return a TCP port that nobody listens on at this moment, at an IP address or at all of them."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        server.bind((address, 0))
        return int(server.getsockname()[1])
