"""One launcher in a results folder at a time: flock(2) on a file that says who holds it. Reading results needs no lock.

The kernel ends a lock with its holder, however that ends; NFS and parallel file systems keep it between machines.
"""

import contextlib
import errno
import fcntl
import os
import platform
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from tprimat.core.errors import LaunchError

LOCK_FILE = ".launcher"
LONGEST_TEXT = 4096
HOLDER = re.compile(r"process \d+ [^\x00-\x1f]+ since [\d:T+-]+")
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""What file systems without flock(2) answer; nothing protects a folder there."""
HELD = "TPRIMAT_HELD"
"""Variable with the folders that a launcher holds: the processes that it starts work for it, and are let in."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a results folder, which is created if it is missing; refuse one that another launcher holds."""
    held = os.environ.get(HELD, "")
    if str(folder.resolve()) in held.split(os.pathsep):
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _take(folder)
    except OSError as error:
        what = f"The output folder {folder} cannot be written: {error.strerror}."
        raise LaunchError(what, where="--output-dir", fix="--output-dir with a folder of yours, or free some space") from error
    os.environ[HELD] = f"{held}{os.pathsep}{folder.resolve()}"
    try:
        yield
    finally:
        os.environ[HELD] = held
        with contextlib.suppress(OSError):
            os.truncate(file, 0)  # the file stays: removing it would let two launchers lock two files of that name
        os.close(file)


def holder_of(folder: Path) -> str | None:
    """Return who holds a folder now, such as 'process 4242 on gpu07 since 10:00'; None: nobody."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            return None if _lock(file.fileno()) else _read(file.fileno())
    except OSError:
        return None


def _take(folder: Path) -> int:
    """Return the descriptor of the lock; a LaunchError if another launcher holds it."""
    file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if not _lock(file):
        holder = _read(file)
        os.close(file)
        raise LaunchError(
            f"The output folder {folder} is in use.",
            where="--output-dir",
            why=f"It is held by {holder}. Two launchers in one folder would overwrite each other's results.",
            fix="--output-dir with another folder, or wait until it has ended",
        )
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    holder = f"process {os.getpid()} on {platform.node()} since {since}"
    os.truncate(file, 0)
    os.pwrite(file, f"{holder}\n".encode(), 0)
    return file


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _read(file: int) -> str:
    """Return what a lock says of its holder; where it is empty, half written or something else, that there is one."""
    line, end, _ = os.pread(file, LONGEST_TEXT, 0).decode(errors="replace").partition("\n")
    return line.replace(f" on {platform.node()} ", " on this machine ") if end and HOLDER.fullmatch(line) else "another launcher"
