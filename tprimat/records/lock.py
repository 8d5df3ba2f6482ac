"""One launcher in a results folder at a time: a lock that says who holds it.

flock(2) decides between the processes of one kernel, and ends with its holder however that ends. The text of the file says who
holds it, and decides between machines that share a file system without such locks. Reading results needs no lock.
"""

import contextlib
import errno
import fcntl
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tprimat.core.errors import LaunchError, RecordError
from tprimat.records.store import from_json, to_json

LOCK_FILE = ".launcher"
BEAT_SECONDS = 20.0
SILENT_SECONDS = 300.0
"""A holder on another machine that has not touched the file for this long is gone."""
LONGEST_TEXT = 4096
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""What file systems without flock(2) answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The launcher that holds a folder."""

    pid: int
    host: str
    boot: str
    """Identifier of the kernel's start: after a reboot the same pid is another process."""
    namespace: str
    """In which the pid counts; containers have their own."""
    since: str
    """When it took the folder, ISO 8601 in UTC."""
    job: tuple[str, int] | None = None
    """The scheduler's job that it belongs to, and how often that had been started again."""

    def __str__(self) -> str:
        """Return who it is: 'process 4242 (slurm 7) on gpu07'."""
        job = "" if self.job is None else f" ({self.job[0]})"
        return f"process {self.pid}{job} on {'this machine' if self.host == platform.node() else self.host}"


@contextlib.contextmanager
def locked(folder: Path, job: tuple[str, int] | None = None) -> Iterator[None]:
    """Hold a results folder, which is created if it is missing.

    A lock whose holder has ended is taken over. Processes that the holder started are let in: they work for it. `job` is the
    scheduler's job of this process, and how often it has been started again.

    Raises:
        LaunchError: another launcher holds the folder, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _take(folder, job)
    except OSError as error:
        what = f"The output folder {folder} cannot be written: {error.strerror}."
        raise LaunchError(what, where="--output-dir", fix="--output-dir with a folder of yours, or free some space") from error
    if file is None:
        yield
        return
    released = threading.Event()
    beat = threading.Thread(target=_beat, args=(file, released), daemon=True)
    beat.start()
    try:
        yield
    finally:
        released.set()
        beat.join()
        with contextlib.suppress(OSError):
            if _is_at(file, folder / LOCK_FILE):  # the folder may have been moved, and another one put in its place
                (folder / LOCK_FILE).unlink()
        os.close(file)


def holder_of(folder: Path) -> Holder | None:
    """Return the launcher that holds a folder now, or None."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            holder = _read(file.fileno())
            return holder if holder is not None and _lives(holder, _lock(file.fileno()), file.fileno(), folder) else None
    except OSError:
        return None


def _take(folder: Path, job: tuple[str, int] | None) -> int | None:
    """Return the descriptor of the lock; None where an ancestor of this process holds it.

    Raises:
        LaunchError: another launcher holds it.
        OSError: the folder cannot be written.
    """
    path = folder / LOCK_FILE
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        with contextlib.ExitStack() as unless_kept:
            unless_kept.callback(os.close, file)
            free, holder = _lock(file), _read(file)
            lives = holder is not None and _lives(holder, free, file, folder)
            if holder is not None and lives and (holder.boot, holder.namespace) == _kernel() and holder.pid in _ancestors():
                return None
            if free is False or (lives and not _is_an_earlier_start(holder, job)):
                raise _in_use(folder, holder)
            if _is_at(file, path):  # otherwise its holder removed it in the meantime
                os.truncate(file, 0)
                os.pwrite(file, f"{to_json(_myself(job))}\n".encode(), 0)
                unless_kept.pop_all()
                return file


def _lock(file: int) -> bool | None:
    """Return whether the kernel gave us the lock; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def _lives(holder: Holder, free: bool | None, file: int, folder: Path) -> bool:
    """Return whether a holder still runs, as far as can be seen from here; `free` is what the kernel says of the lock."""
    boot, namespace = _kernel()
    if holder.boot == boot and free is not None:
        return not free
    if (holder.boot, holder.namespace) == (boot, namespace):
        return Path("/proc", str(holder.pid)).exists()
    if holder.host == platform.node() and holder.boot != boot:
        return False  # this machine has started again since
    return _now(folder) - os.fstat(file).st_mtime < SILENT_SECONDS


def _is_an_earlier_start(holder: Holder | None, job: tuple[str, int] | None) -> bool:
    """Return whether the holder belongs to an earlier start of this very job, all of whose processes the scheduler has ended."""
    held = None if holder is None else holder.job
    return held is not None and job is not None and held[0] == job[0] and held[1] < job[1]


def _in_use(folder: Path, holder: Holder | None) -> LaunchError:
    here = holder is None or holder.host == platform.node()
    who = "Another launcher" if holder is None else f"P{str(holder)[1:]}"
    since = "" if holder is None else f" since {holder.since}"
    return LaunchError(
        f"The output folder {folder} is in use.",
        where="--output-dir",
        why=f"{who} has been writing results there{since}. Runs of two launchers in one folder would overwrite each other.",
        fix="--output-dir with another folder, or wait until it has ended"
        + ("" if here else f"; if you know that it has, remove {folder / LOCK_FILE}"),
    )


def _beat(file: int, released: threading.Event) -> None:
    while not released.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(file)


def _read(file: int) -> Holder | None:
    """Return the holder that a lock names; None where it is empty, half written or something else."""
    try:
        return from_json(Holder, os.pread(file, LONGEST_TEXT, 0), where=LOCK_FILE)
    except RecordError:
        return None


def _now(folder: Path) -> float:
    """Return the time by the clock of the file system, which this machine's may differ from."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # a reader who may not write there
        return time.time()


def _is_at(file: int, path: Path) -> bool:
    """Return whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _myself(job: tuple[str, int] | None = None) -> Holder:
    boot, namespace = _kernel()
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Holder(pid=os.getpid(), host=platform.node(), boot=boot, namespace=namespace, since=since, job=job)


def _kernel() -> tuple[str, str]:
    """Return the identifier of this boot and the namespace in which this process has its pid; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot, str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "", ""


def _ancestors() -> set[int]:
    """Return the pids of this process, its parent, and so on; proc(5)."""
    pids, pid = set(), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            text = Path("/proc", str(pid), "stat").read_text(encoding="utf8", errors="replace")
        except OSError:
            break
        pid = int(text[text.rfind(")") + 2 :].split()[1])
    return pids
