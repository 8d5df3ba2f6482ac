"""The only reader and writer of the files of a run and of traces; dataclasses as JSON files, with errors that name file and line.

OUTPUT/runs/RUN_ID/   plan.json   what was requested
                      run.json    what ran and how it ended, replaced atomically
                      steps.jsonl one line per step, appended as the step ends
                      telemetry.jsonl  power and clocks of the GPUs, one line per reading
                      training.log     everything the framework printed
"""

import contextlib
import errno
import gc
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeVar

import pydantic_core
from pydantic import ValidationError

from tprimat.core.errors import ConfigError, RecordError
from tprimat.core.limits import LARGEST_DOCUMENT, LARGEST_STEP, LARGEST_UNPACKED, most_unpacked
from tprimat.core.rows import adapter, explain
from tprimat.records.schema import SCHEMA_VERSION, Machine, ProbeRecord, RunRecord, StepRecord, TelemetrySample
from tprimat.records.sharing import without_secrets

T = TypeVar("T")

RESERVE_FILE = ".room"
RESERVE_BYTES = 1 << 15
"""Several times a run.json and its temporary copy."""


RUN_LINE = "tprimat run: "
"""Begins the line of a training log that holds the record of the run as JSON."""


def to_json(value: object, *, indent: int | None = None) -> str:
    """Return a dataclass as JSON; numbers that are not finite become null."""
    return adapter(type(value)).dump_json(value, indent=indent).decode()


def from_json(kind: type[T], text: str | bytes, *, where: str) -> T:
    """Read a dataclass from JSON; a RecordError names the first few unknown or missing keys, wrong types and numbers."""
    try:
        return adapter(kind).validate_json(text)
    except (ValidationError, ConfigError) as error:
        fix = "copy the file again, or move it away"
        raise RecordError(f"{where} is not a valid {kind.__name__}.", where=where, why=explain(error), fix=fix) from error


def checked(kind: type[T], values: object, path: Path) -> T:
    """Check values that another reader took from a file, as `from_json` does: records, or dictionaries."""
    try:
        return adapter(kind).validate_python(adapter(type(values)).dump_python(values))
    except (ValidationError, ConfigError) as error:
        what = f"{path} does not fit schema version {SCHEMA_VERSION}."
        raise RecordError(what, where=str(path), why=explain(error)) from error


def json_document(content: bytes, path: Path) -> Any:
    """Parse JSON; an error names the line. Numbers of thousands of digits and nesting without end are refused."""
    try:
        return pydantic_core.from_json(content.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        reason, _, place = str(error).partition(" at line ")
        line = f":{place.split()[0]}" if place else ""
        if reason == "expected value":
            reason = "A value is missing, or is not valid in JSON."
        raise RecordError(f"{path} is not JSON.", where=f"{path}{line}", why=reason) from error


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace a file atomically: readers and crashes leave the old text or the new one. Only this user may read a private one.

    A device or a pipe is written to, not replaced: root would replace /dev/null for everybody.
    """
    data = content.encode("utf8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.parent == Path("/dev") or path.is_fifo():
            with path.open("ab") as file:
                file.write(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def append_line(path: Path, text: str) -> None:
    """Append one line, which then survives a kill -9 of this process.

    A partial line that an earlier writer left when it was killed is removed first.
    """
    try:
        with path.open("a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
            line = f"{text}\n".encode()
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise cannot_write(path, error) from error


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of writing more than fits."""


def cannot_write(path: Path, error: OSError) -> RecordError:
    """Return the error for a file that the operating system refuses to write."""
    fix = "free space, or choose another place for the output" if error.errno in NO_ROOM else "another place for the output"
    return RecordError(f"{path} cannot be written: {error.strerror or error}.", where=str(path), fix=fix)


@contextlib.contextmanager
def opened(path: Path, most: int | None = None) -> Iterator[IO[bytes]]:
    """Open a regular file, or a link to one, of at most `most` bytes for reading.

    A pipe or a device would never end, so it is refused without waiting.
    """
    try:
        with open(path, "rb", opener=without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RecordError(
                    f"{path} is not a regular file.", where=str(path), why="Results are read from regular files only."
                )
            if most is not None and status.st_size > most:
                raise RecordError(f"{path} has {status.st_size:,} bytes.", where=str(path), why=f"At most {most:,} are read.")
            yield file
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:  # of a file that the caller writes meanwhile
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecordError(f"{path} cannot be read: {reason}.", where=str(path)) from error


def without_waiting(path: str, flags: int) -> int:
    """Open a file for `open`; a named pipe that nobody writes to reads as empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """Read a whole file, of a gzip file what it holds; see `opened`."""
    with opened(path, most) as file:
        content = file.read()  # `read(most)` would reserve that much memory first
    if not content.startswith(GZIP_START):
        return content
    most = min(most, most_unpacked(len(content)))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            unpacked = packed.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(f"{path} is a damaged gzip file.", where=str(path), why=str(error)) from error
    if len(unpacked) > most:
        raise RecordError(f"{path} unpacks to more than {most:,} bytes.", where=str(path))
    return unpacked


def read_lines(kind: type[T], path: Path) -> list[T]:
    """Read the records of a .jsonl file. A last line cut short by a crash is skipped; a broken line elsewhere is an error."""
    if not os.path.lexists(path):
        return []
    *complete, _ = read_bytes(path, LARGEST_UNPACKED).split(b"\n")
    lines = [(number, line) for number, line in enumerate(complete, start=1) if line]
    try:  # all together, which takes half the time of one by one
        return adapter(list[kind]).validate_json(b"[" + b",".join(line for _, line in lines) + b"]")  # type: ignore[valid-type]
    except (ValidationError, ConfigError):
        return [from_json(kind, line, where=f"{path}:{number}") for number, line in lines]


def as_document(value: Any) -> Any:
    """Return a dataclass as dictionaries, lists, numbers and text."""
    return adapter(type(value)).dump_python(value, mode="json")


def rising(steps: tuple[StepRecord, ...], path: Path) -> tuple[StepRecord, ...]:
    """Return the steps of a file, whose numbers must rise: those of a file that was appended to itself do not."""
    for former, later in pairwise(steps):
        if later.step <= former.step:
            what = f"{path} has step {later.step} after step {former.step}."
            raise RecordError(what, where=str(path), why="Each step must appear once, in order.", fix="copy the file again")
    return steps


class RunDirectory:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_file = path / "plan.json"
        self.run_file = path / "run.json"
        self.steps_file = path / "steps.jsonl"
        self.telemetry_file = path / "telemetry.jsonl"
        self.log_file = path / "training.log"

    def write_run(self, run: RunRecord) -> None:
        """Replace run.json. Its command was masked when it was read; what a log says is masked here."""
        written = replace(run, cause=run.cause and without_secrets(run.cause), hint=run.hint and without_secrets(run.hint))
        write_atomically(self.run_file, to_json(written, indent=2) + "\n")

    def read_run(self) -> RunRecord:
        """Read the current record; the outcome of a run under way is running."""
        return from_json(RunRecord, read_bytes(self.run_file), where=str(self.run_file))

    def reserve_space(self) -> None:
        """Keep room for the last record, so that a disk that fills up during the run does not leave it without an end."""
        with contextlib.suppress(OSError):  # without room now, the first step says so
            (self.path / RESERVE_FILE).write_bytes(b"\xff" * RESERVE_BYTES)

    def release_space(self) -> None:
        """Free the room for the last record."""
        with contextlib.suppress(OSError):
            (self.path / RESERVE_FILE).unlink()

    def append_step(self, step: StepRecord) -> None:
        """Append one step; it survives the end of this process."""
        append_line(self.steps_file, to_json(step))

    def read_steps(self) -> tuple[StepRecord, ...]:
        """Read all complete steps."""
        return tuple(read_lines(StepRecord, self.steps_file))

    def read_whole(self) -> tuple[RunRecord, tuple[StepRecord, ...]]:
        """Read the record and the steps of a run; refuse steps that repeat, or fewer than it completed or planned."""
        run, steps = self.read_run(), rising(self.read_steps(), self.steps_file)
        if run.outcome == "completed" and run.steps_recorded is None and self.plan_file.is_file():
            with contextlib.suppress(RecordError):
                plan = json_document(read_bytes(self.plan_file), self.plan_file)
                planned = plan.get("steps") if isinstance(plan, dict) else None
                run = replace(run, steps_recorded=planned if isinstance(planned, int) and 0 < planned <= LARGEST_STEP else None)
        if run.outcome == "completed" and len(steps) < (run.steps_recorded or 0):
            raise RecordError(
                f"{self.path} holds {len(steps)} of the {run.steps_recorded} steps of its run.",
                where=str(self.steps_file),
                why="They were lost after the run had ended.",
                fix="copy the folder of the run again",
            )
        return run, steps

    def append_telemetry(self, sample: TelemetrySample) -> None:
        """Append one reading."""
        append_line(self.telemetry_file, to_json(sample))

    def read_telemetry(self, machine: Machine | None = None) -> tuple[TelemetrySample, ...]:
        """Read all readings, those of other nodes too (node-1 and so on, as far as they are on this disk).

        From the GPUs on each node of the run's machine follow the numbers that other nodes' GPUs have in the run.
        """
        samples = read_lines(TelemetrySample, self.telemetry_file)
        if machine is None or not machine.gpus_per_node or (machine.nodes or 1) == 1:
            return tuple(samples)
        for node in range(1, machine.nodes or 1):
            others = read_lines(TelemetrySample, self.path / f"node-{node}" / self.telemetry_file.name)
            samples += [replace(sample, gpu=node * machine.gpus_per_node + sample.gpu) for sample in others]
        return tuple(samples)


def append_probe(path: Path, probe: ProbeRecord) -> None:
    """Append one measured operation to a probes.jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, to_json(probe))


def read_probes(path: Path) -> tuple[ProbeRecord, ...]:
    """Read all measured operations of a probes.jsonl."""
    return tuple(read_lines(ProbeRecord, path))


# Traces of torch's profiler: JSON for Chrome's trace viewer, plain or gzipped.

GZIP_START = b"\x1f\x8b"
EVENTS_START, EVENTS_END = b'"traceEvents": [\n', b"\n  ]"
"""As Kineto writes them, with each event on lines of its own between them."""


def read_trace(path: Path, wanted: re.Pattern[bytes] | None = None) -> dict[str, Any]:
    """Read a file as a trace, of what Kineto wrote only the events that `wanted` finds; refuse what is too large or no trace."""
    content, running = read_bytes(path, LARGEST_UNPACKED), gc.isenabled()
    gc.disable()  # the collector of cycles would walk millions of new objects again and again to no effect
    try:
        document = _trace_document(content, wanted)
    except (ValueError, RecursionError) as error:
        why = f"{error}; a trace that is cut short looks like this"
        raise RecordError(f"{path} is not JSON.", where=str(path), why=why) from error
    finally:
        if running:
            gc.enable()
    if isinstance(document, list):  # the format allows the events alone
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        why, fix = "It has no list of traceEvents.", "profile_*.json of the output folder"
        raise RecordError(f"{path} is not a trace.", where=str(path), why=why, fix=fix)
    return document


def _trace_document(content: bytes, wanted: re.Pattern[bytes] | None) -> Any:
    start, end = content.find(EVENTS_START) + len(EVENTS_START), content.rfind(EVENTS_END)
    if wanted is not None and len(EVENTS_START) <= start <= end and (kept := wanted.findall(content, start - 1, end)):
        with contextlib.suppress(ValueError):  # of another layout: read all of it
            return _loads(content[:start] + b",".join(kept) + content[end:])
    return _loads(content)


def _loads(content: bytes) -> Any:
    # Names of kernels come unescaped from the libraries, with control characters and bytes that are not UTF-8.
    return json.loads(content.decode("utf8", errors="replace"), strict=False)
