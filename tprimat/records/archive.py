"""Results in one .tar.gz: reproducible, and readable without unpacking."""

import gzip
import io
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from tprimat.core.errors import RecordError
from tprimat.core.limits import most_unpacked
from tprimat.records.store import NO_ROOM, write_atomically

SUFFIXES = (".tar.gz", ".tgz")
RESULTS = ("run.json", "steps.jsonl", "telemetry.jsonl", "probes.jsonl", "benchmark_*.json", "train_*.json")
"""Files that results are read from; nothing else is unpacked."""
ANOTHER_TMPDIR = "TMPDIR=FOLDER in front of the command, where there is room"


def is_archive(path: Path) -> bool:
    """Whether a path has an archive's suffix."""
    return path.name.endswith(SUFFIXES)


@contextmanager
def unpacked(path: Path, most: int | None = None) -> Iterator[Path]:
    """Unpack the results of an archive into a temporary folder: regular files only, and none outside the folder (PEP 706).

    Raises:
        RecordError: not an archive, damaged, too large (by default, for its size), or with a path that leads outside; or there is
            no room.
    """
    try:
        spare = tempfile.TemporaryDirectory(prefix="tprimat-")
    except OSError as error:
        what = "No temporary folder can be written."
        raise RecordError(what, where=error.filename, why=error.strerror, fix=ANOTHER_TMPDIR) from error
    with spare as name:
        folder = Path(name)
        try:
            with gzip.open(path) as packed, tarfile.open(fileobj=packed, mode="r|") as members:
                _extract_results(members, folder, path, most or most_unpacked(path.stat().st_size))
                while packed.read(1 << 20):  # the checksum stands at the end, behind that of the archive
                    pass
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) in NO_ROOM:
                what = f"{path} does not fit into the temporary folder {folder.parent}."
                raise RecordError(what, where=str(path), why=reason, fix=ANOTHER_TMPDIR) from error
            raise RecordError(f"{path} is not a complete archive of results.", where=str(path), why=reason) from error
        yield folder


def _extract_results(members: tarfile.TarFile, folder: Path, archive: Path, most: int) -> None:
    size = 0
    for member in members:
        size += member.size
        if size > most:
            raise RecordError(f"{archive} unpacks to more than {most:,} bytes.", where=str(archive))
        if member.isreg() and any(fnmatch(PurePosixPath(member.name).name, pattern) for pattern in RESULTS):
            members.extract(member, folder, set_attrs=False, filter="data")


def write_archive(target: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write names with their texts; the archive replaces the target when it is complete. The same files give the same bytes.

    Raises:
        RecordError: the target cannot be written.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, text in files:
            content = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    write_atomically(target, packed.getvalue())
