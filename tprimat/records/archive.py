"""Results in one file: a .tar.gz that is the same for the same results, names nothing private, and is read as it is."""

import gzip
import io
import json
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from tprimat.errors import RecordError
from tprimat.records.files import cannot_write
from tprimat.records.redaction import Masker

SUFFIXES = (".tar.gz", ".tgz")
RESULTS = ("run.json", "steps.jsonl", "telemetry.jsonl", "probes.jsonl", "benchmark_*.json", "train_*.json")
"""What readers of results read; of an archive only this is unpacked."""
PACKED = (*RESULTS, "plan.json", "*.log", "*.yaml")
NUMBERS_ONLY = ("steps.jsonl", "telemetry.jsonl")
REPORT = "report.html"
LARGEST = 4 * 2**30
"""Bytes that an archive may hold unpacked; more is refused before it is written."""


def is_archive(path: Path) -> bool:
    """By its name."""
    return path.name.endswith(SUFFIXES)


class _Bounded(io.RawIOBase):
    """Passes on a stream, and refuses when it turns out longer than is allowed: a small file can unpack to any size."""

    def __init__(self, stream: gzip.GzipFile, where: Path, most: int) -> None:
        self.stream, self.where, self.left = stream, where, most

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes."""
        asked = self.left + 1 if size < 0 else size
        content = self.stream.read(min(asked, self.left + 1))
        self.left -= len(content)
        if self.left < 0:
            raise RecordError(f"{self.where} unpacks to more than {LARGEST:,} bytes.", where=str(self.where))
        return content


@contextmanager
def unpacked(path: Path, most: int = LARGEST) -> Iterator[Path]:
    """A folder with the results in an archive, gone when the block ends. Files only, and none outside of the folder.

    Raises:
        RecordError: not an archive, damaged, too large, or it names a place outside of itself.
    """
    with tempfile.TemporaryDirectory(prefix="tprimat-") as folder:
        try:
            with (
                gzip.open(path) as stream,
                tarfile.open(fileobj=cast(IO[bytes], _Bounded(stream, path, most)), mode="r|") as members,
            ):
                for member in members:
                    _extract(members, member, Path(folder), path)
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RecordError(f"{path} is not a whole archive of results.", where=str(path), why=reason) from error
        yield Path(folder)


def _extract(members: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, archive: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name:
        raise RecordError(f"{archive} names {member.name}, a place outside of itself.", where=str(archive), fix="do not trust it")
    if not member.isreg() or not _fits(name.name, RESULTS):
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


def pack(places: Sequence[Path], target: Path, masker: Masker) -> list[str]:
    """Write an archive of all results, plans and logs under some places, masked.

    The same files give the same bytes: entries are sorted and bear no time, owner or mode of theirs.

    Args:
        places: folders and files.
        target: replaced in one step.
        masker: learns here which hosts and users the files name.

    Returns:
        The names in the archive.

    Raises:
        RecordError: a place is missing or is an archive, a file cannot be read, or the target cannot be written.
    """
    files = dict(sorted(_files(places, target)))
    for source in files.values():
        if source.name not in NUMBERS_ONLY:
            _each_line(source, masker)
    with _written(target) as archive:
        for name, source in files.items():
            with masked(source, masker) as content:
                _add(archive, name, content)
    return list(files)


def with_texts(packed: Path, target: Path, texts: dict[str, str]) -> None:
    """Copy an archive, with some texts, name -> content, before its files."""
    with _written(target) as archive, tarfile.open(packed) as members:
        for name, text in sorted(texts.items()):
            _add(archive, name, io.BytesIO(text.encode()))
        for member in members:
            archive.addfile(member, members.extractfile(member))


@contextmanager
def _written(target: Path) -> Iterator[tarfile.TarFile]:
    """An archive to fill; it takes its place when it is whole."""
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
        temporary.unlink(missing_ok=True)


def _each_line(source: Path, masker: Masker) -> None:
    try:
        with source.open(encoding="utf8", errors="replace") as lines:
            for line in lines:
                masker.learn(line)
    except OSError as error:
        raise RecordError(f"{source} cannot be read: {error.strerror}.", where=str(source)) from error


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes]) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = content.seek(0, io.SEEK_END)
    content.seek(0)
    entry.mode = 0o644
    archive.addfile(entry, content)


def _files(places: Sequence[Path], target: Path) -> Iterator[tuple[str, Path]]:
    """Name in the archive, file. Folders of the same name are numbered; links are not followed."""
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
def masked(source: Path, masker: Masker) -> Iterator[IO[bytes]]:
    """The content of a file without secrets and names; a file without any keeps every byte."""
    with tempfile.TemporaryFile() as made:
        if source.name in NUMBERS_ONLY:
            made.write(source.read_bytes())
        elif source.suffix in {".json", ".jsonl"}:
            made.write(_masked_documents(source, masker).encode())
        else:
            with source.open(encoding="utf8", errors="replace", newline="") as lines:
                made.writelines(line.encode() for line in masker.lines(lines))
        yield made


def _masked_documents(source: Path, masker: Masker) -> str:
    text = source.read_text(encoding="utf8", errors="replace")
    if source.suffix == ".json":
        return _masked_document(text, masker, indent=2)
    return "".join(_masked_document(line, masker, indent=None) for line in text.splitlines(keepends=True))


def _masked_document(text: str, masker: Masker, indent: int | None) -> str:
    """A damaged document is masked as the text that it is."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return masker.text(text)
    clean = masker.document(document)
    return text if clean == document else json.dumps(clean, indent=indent) + "\n"
