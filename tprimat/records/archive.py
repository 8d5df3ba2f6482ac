"""Results in one .tar.gz: reproducible, readable without unpacking, and redacted."""

import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from tprimat.core.errors import RecordError
from tprimat.records.redaction import Redactor
from tprimat.records.store import LARGEST_DOCUMENT, LARGEST_LINE, NO_ROOM, cannot_write, opened, read_bytes

SUFFIXES = (".tar.gz", ".tgz")
RESULTS = ("run.json", "steps.jsonl", "telemetry.jsonl", "probes.jsonl", "benchmark_*.json", "train_*.json")
"""Files that results are read from; nothing else is unpacked."""
PACKED = (*RESULTS, "plan.json", "*.log", "*.yaml")
NUMBERS_ONLY = ("steps.jsonl", "telemetry.jsonl")
REPORT = "report.html"
LARGEST = 4 * 2**30
"""Most bytes of an unpacked archive."""
MOST_EXPANSION = 200
"""Most bytes of an unpacked archive for each of its own. Logs and records grow five- to twentyfold, zeros a thousandfold."""
ALWAYS_ALLOWED = 16 * 2**20
"""Bytes of an unpacked archive that need no such ratio."""
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
            why = f"Archives of results grow up to {MOST_EXPANSION}-fold, and up to {LARGEST:,} bytes."
            raise RecordError(f"{self.where} unpacks to more than {self.most:,} bytes.", where=str(self.where), why=why)
        return content


@contextmanager
def spare_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end.

    Raises:
        RecordError: no temporary folder can be written.
    """
    try:
        spare = tempfile.TemporaryDirectory(prefix="tprimat-")
    except OSError as error:
        what = "No temporary folder can be written."
        raise RecordError(what, where=error.filename, why=error.strerror, fix=ANOTHER_TMPDIR) from error
    with spare as folder:
        yield Path(folder)


@contextmanager
def unpacked(path: Path, most: int = LARGEST) -> Iterator[Path]:
    """Unpack the results of an archive into a temporary folder: regular files only, and none outside the folder.

    Raises:
        RecordError: not an archive, damaged, too large, or with a path that leads outside.
    """
    with spare_folder() as folder:
        try:
            with (
                gzip.open(path) as stream,
                tarfile.open(fileobj=cast(IO[bytes], _Bounded(stream, path, most)), mode="r|") as members,
            ):
                for member in members:
                    _extract(members, member, folder, path)
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) in NO_ROOM:
                what = f"{path} does not fit into the temporary folder {folder.parent}."
                raise RecordError(what, where=str(path), why=reason, fix=ANOTHER_TMPDIR) from error
            raise RecordError(f"{path} is not a complete archive of results.", where=str(path), why=reason) from error
        yield folder


def _extract(members: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, archive: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name:
        raise RecordError(
            f"{archive} names {member.name}, a path outside the archive.", where=str(archive), fix="do not trust it"
        )
    if not member.isreg() or member.issparse() or not _fits(name.name, RESULTS):
        return
    source = members.extractfile(member)
    if source is None:
        return
    target = folder.joinpath(*name.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        while part := source.read(1 << 20):
            file.write(part)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What an archive holds, and what it lacks."""

    names: list[str]
    problems: list[RecordError]
    """Files that could not be read, and are left out."""


def pack(places: Sequence[Path], target: Path, redactor: Redactor) -> Packed:
    """Write a redacted archive of all results, plans and logs in some places, in one step.

    The same files give the same bytes: entries are sorted, without the files' times, owners and modes. The redactor learns the
    hosts and users that the files name.

    Raises:
        RecordError: a place is missing or is an archive, or the target cannot be written.
    """
    problems: list[RecordError] = []
    files = {}
    for name, source in sorted(_files(places, target)):
        try:
            _learn(name, source, redactor)
            files[name] = source
        except RecordError as error:
            problems.append(error)
    with _written(target) as archive:
        for name, source in files.items():
            with redacted(source, redactor) as content:
                _add(archive, name, content)
    return Packed(names=list(files), problems=problems)


def with_texts(packed: Path, target: Path, texts: dict[str, str]) -> None:
    """Copy an archive and put some texts, name -> content, before its files."""
    with _written(target) as archive, tarfile.open(packed) as members:
        for name, text in sorted(texts.items()):
            _add(archive, name, io.BytesIO(text.encode()))
        for member in members:
            archive.addfile(member, members.extractfile(member))


@contextmanager
def _written(target: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive for writing; it replaces the target when it is complete."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            yield archive
        temporary.replace(target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        with suppress(OSError):  # no such file, or a disk that is read-only, which was said
            temporary.unlink()


def _learn(name: str, source: Path, redactor: Redactor) -> None:
    """Read a file once, for the hosts and users that it names."""
    if name != name.encode("utf8", "replace").decode():
        shown = str(source).encode("utf8", "backslashreplace").decode()
        raise RecordError(f"{shown} has a name that is not UTF-8 text.", where=shown, fix="rename it")
    with opened(source, LARGEST_DOCUMENT if source.suffix == ".json" else LARGEST) as lines:
        if source.name not in NUMBERS_ONLY:
            for line in iter(lambda: lines.readline(LARGEST_LINE), b""):
                redactor.learn(line.decode("utf8", errors="replace"))


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes]) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = content.seek(0, io.SEEK_END)
    content.seek(0)
    entry.mode = 0o644
    archive.addfile(entry, content)


def _files(places: Sequence[Path], target: Path) -> Iterator[tuple[str, Path]]:
    """Yield names in the archive with their files. Folders of the same name are numbered; links are not followed."""
    taken: set[str] = set()
    for place in places:
        if is_archive(place) or not place.exists():
            what = "is an archive already" if place.exists() else "does not exist"
            raise RecordError(f"{place} {what}.", where=str(place), fix="name folders and files with results")
        name = root = place.resolve().name or "results"
        number = 2
        while root in taken:
            root, number = f"{name}-{number}", number + 1
        taken.add(root)
        if place.is_file():
            yield (root if _fits(root, RESULTS) else f"benchmark_{root}"), place
            continue
        for folder, _, names in os.walk(place):
            for file in (Path(folder, name) for name in names if _fits(name, PACKED)):
                if not file.is_symlink() and file != target:
                    yield f"{root}/{file.relative_to(place).as_posix()}", file


@contextmanager
def redacted(source: Path, redactor: Redactor) -> Iterator[IO[bytes]]:
    """Open the redacted content of a file; a file without secrets and names keeps every byte."""
    with tempfile.TemporaryFile() as content:
        if source.name in NUMBERS_ONLY:
            with opened(source) as numbers:
                shutil.copyfileobj(numbers, content)
        elif source.suffix in {".json", ".jsonl"}:
            content.write(_redacted_documents(source, redactor).encode())
        else:
            with opened(source) as raw:
                lines = io.TextIOWrapper(raw, encoding="utf8", errors="replace", newline="")
                content.writelines(line.encode() for line in redactor.lines(iter(lambda: lines.readline(LARGEST_LINE), "")))
        yield content


def _redacted_documents(source: Path, redactor: Redactor) -> str:
    text = read_bytes(source).decode("utf8", errors="replace")
    if source.suffix == ".json":
        return _redacted_document(text, redactor, indent=2)
    return "".join(_redacted_document(line, redactor, indent=None) for line in text.splitlines(keepends=True))


def _redacted_document(text: str, redactor: Redactor, indent: int | None) -> str:
    """Redact a document; a damaged one as text."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return redactor.text(text)
    clean = redactor.document(document)
    return text if clean == document else json.dumps(clean, indent=indent) + "\n"
