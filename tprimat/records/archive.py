"""Results in one .tar.gz: reproducible, and readable without unpacking."""

import gzip
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, cast

from tprimat.core.errors import RecordError
from tprimat.core.limits import ALWAYS_ALLOWED, LARGEST_UNPACKED, MOST_EXPANSION
from tprimat.records.store import NO_ROOM, cannot_write

SUFFIXES = (".tar.gz", ".tgz")
RESULTS = ("run.json", "steps.jsonl", "telemetry.jsonl", "probes.jsonl", "benchmark_*.json", "train_*.json")
"""Files that results are read from; nothing else is unpacked."""
ANOTHER_TMPDIR = "TMPDIR=FOLDER in front of the command, where there is room"


def is_archive(path: Path) -> bool:
    """Whether a path has an archive's suffix."""
    return path.name.endswith(SUFFIXES)


class _Bounded(io.RawIOBase):
    """A stream of limited length: a small file can unpack to any size."""

    def __init__(self, stream: gzip.GzipFile, where: Path, most: int) -> None:
        self.most = min(most, max(ALWAYS_ALLOWED, MOST_EXPANSION * where.stat().st_size))
        self.stream, self.where, self.left = stream, where, self.most

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes."""
        requested = self.left + 1 if size < 0 else size
        content = self.stream.read(min(requested, self.left + 1))
        self.left -= len(content)
        if self.left < 0:
            why = f"Archives of results grow up to {MOST_EXPANSION}-fold, and up to {LARGEST_UNPACKED:,} bytes."
            raise RecordError(f"{self.where} unpacks to more than {self.most:,} bytes.", where=str(self.where), why=why)
        return content


@contextmanager
def unpacked(path: Path, most: int = LARGEST_UNPACKED) -> Iterator[Path]:
    """Unpack the results of an archive into a temporary folder: regular files only, and none outside the folder.

    Raises:
        RecordError: not an archive, damaged, too large, or with a link or a path that leads outside; or there is no room.
    """
    try:
        spare = tempfile.TemporaryDirectory(prefix="tprimat-")
    except OSError as error:
        what = "No temporary folder can be written."
        raise RecordError(what, where=error.filename, why=error.strerror, fix=ANOTHER_TMPDIR) from error
    with spare as name:
        folder = Path(name)
        try:
            with gzip.open(path) as packed:
                stream = _Bounded(packed, path, most)
                with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as members:
                    for member in members:
                        _extract(members, member, folder, path)
                while stream.read(1 << 20):  # the checksum stands at the end, behind that of the archive
                    pass
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) in NO_ROOM:
                what = f"{path} does not fit into the temporary folder {folder.parent}."
                raise RecordError(what, where=str(path), why=reason, fix=ANOTHER_TMPDIR) from error
            raise RecordError(f"{path} is not a complete archive of results.", where=str(path), why=reason) from error
        yield folder


def _extract(members: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, archive: Path) -> None:
    name = PurePosixPath(member.name)
    outside = name.is_absolute() or ".." in name.parts or "\\" in member.name
    is_result = any(fnmatch(name.name, pattern) for pattern in RESULTS)
    if outside or (is_result and (member.issym() or member.islnk())):
        what = f"a path outside the archive: {member.name}" if outside else f"a link in place of a file: {member.name}"
        raise RecordError(f"{archive} holds {what}.", where=str(archive), fix="do not trust it")
    if not is_result or not member.isreg() or member.issparse():
        return
    source = cast(IO[bytes], members.extractfile(member))
    target = folder.joinpath(*name.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        while part := source.read(1 << 20):
            file.write(part)


def write_archive(target: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write names with their texts; the archive replaces the target when it is complete. The same files give the same bytes.

    Raises:
        RecordError: the target cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, text in files:
                content = text.encode()
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        temporary.replace(target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        with suppress(OSError):  # no such file, or a disk that is read-only, which was said
            temporary.unlink()
