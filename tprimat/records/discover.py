"""Find results and probes in folders, files and archives, whichever program wrote them; and write archives."""

import contextlib
import gzip
import io
import math
import os
import shlex
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from tprimat.core.errors import RecordError
from tprimat.core.limits import FREE_OF_RATIO, most_unpacked
from tprimat.records.benchmark_file import RunResult, own_result
from tprimat.records.legacy import read_legacy
from tprimat.records.schema import ProbeRecord
from tprimat.records.store import NO_ROOM, RunDirectory, json_document, read_bytes, read_probes, write_atomically

RESULT_FILES = ("benchmark_*.json", "train_*.json", "benchmark_*.json.gz", "train_*.json.gz")
"""Names of result files. Another JSON file in a folder is one if it holds step times; a file given by path may have any name."""
OF_STEP_TIMES = b'step_times"'
"""End of a key of every result file, ours and those of other programs."""
SEARCHED_BYTES = 1 << 24
"""Of a file that has another name."""
WHAT_A_RESULT_IS = "A result is a folder with run.json, or a JSON file with the times of its steps."


def load_results(paths: Iterable[Path]) -> tuple[list[RunResult], list[RecordError]]:
    """Read all results in some folders, files and archives, each run once, and return an error for each damaged file.

    A run that is in its own folder and in a benchmark file is read from its folder, unless that has lost steps. Results come in
    the order of the paths, by name inside a folder: a damaged one never hides the others.
    """
    results: dict[str, RunResult] = {}
    problems: list[RecordError] = []
    for path in paths:
        source = _in_archive(path, problems) if _is_packed(path) else _in_place(path, problems)
        for result in source:
            former = results.setdefault(result.run.run_id, result)
            if former is not result and not _is_copy(former, result):
                what = f"{former.path} and {result.path} are two runs named {result.run.run_id}."
                why = "Their steps differ. The first one counts."
                problems.append(RecordError(what, where=str(result.path), why=why, fix="another run_id in one of them"))
            elif len(former.steps) < len(result.steps):
                what = f"{former.path} holds {len(former.steps)} of the {len(result.steps)} steps of its run."
                why = f"{result.path} has them all, and counts instead."
                problems.append(RecordError(what, where=str(former.path), why=why, fix="copy the folder of the run again"))
                results[result.run.run_id] = replace(result, telemetry=former.telemetry)
    return list(results.values()), problems


PRINTED = 1e-3
"""To which a log, from which a copy may have been read, rounds the time of a step and its loss."""


def _is_copy(former: RunResult, result: RunResult) -> bool:
    """Return whether two results of one name have the same numbers, as far as both have any."""
    one, other = ({step.step: step for step in each.steps} for each in (former, result))
    common = one.keys() & other.keys()
    names = ("step_seconds", "loss", "tokens")
    pairs = ((getattr(one[step], name), getattr(other[step], name)) for step in common for name in names)
    known = (pair for pair in pairs if None not in pair)
    return bool(common or not one or not other) and all(math.isclose(*pair, rel_tol=PRINTED, abs_tol=PRINTED) for pair in known)


def _in_place(path: Path, problems: list[RecordError]) -> Iterator[RunResult]:
    try:
        for place in find_results(path):
            try:
                yield read_result(place)
            except RecordError as error:
                problems.append(error)
    except RecordError as error:
        problems.append(error)


def _in_archive(path: Path, problems: list[RecordError]) -> Iterator[RunResult]:
    """Yield the results in an archive; their paths and problems name the archive as if it were a folder."""
    inside: list[RecordError] = []
    try:
        with unpacked(path) as folder:
            for result in _in_place(folder, inside):
                yield replace(result, path=path / result.path.relative_to(folder))
            problems += [error.with_texts(lambda text: text.replace(str(folder), str(path))) for error in inside]
    except RecordError as error:
        problems.append(error)


def find_results(path: Path) -> Iterator[Path]:
    """Yield the run folders and then the result files below a folder; or the one file that is given, which must exist."""
    if os.path.isdir(path):  # noqa: PTH112 (a path that cannot be looked at is no folder)
        files = []
        for folder, folders, names in os.walk(path):
            folders.sort()
            if "run.json" in names:
                yield Path(folder)
            files += [Path(folder, name) for name in names if is_result_file(name) or _has_step_times(Path(folder, name))]
        yield from sorted(files)
    elif os.path.lexists(path):
        yield path.parent if path.name == "run.json" else path
    else:
        fix = "name a folder that holds run.json or benchmark_*.json files"
        raise RecordError(f"There is no file or folder {path}.", where=str(path), fix=fix)


def is_result_file(name: str) -> bool:
    """Return whether a file in a folder is a result, by its name."""
    return any(fnmatch(name, pattern) for pattern in RESULT_FILES)


def _has_step_times(file: Path) -> bool:
    """Whether a file in a folder is a result although its name does not say so."""
    if file.suffix.lower() != ".json" or not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return OF_STEP_TIMES in stream.read(SEARCHED_BYTES)
    except OSError:
        return False


def read_result(place: Path) -> RunResult:
    """Read one run: from a run folder, our own benchmark file, or that of another program."""
    if place.is_dir():
        folder = RunDirectory(place)
        run, steps = folder.read_whole()
        return RunResult(run=run, steps=steps, path=place, telemetry=folder.read_telemetry(run.machine))
    content = read_bytes(place)
    if content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in {b"{", b"["}:
        fix = f"a log? ./extract_primus_metrics.py --log-file {shlex.quote(str(place))} --model-name NAME"
        raise RecordError(f"{place} is not JSON.", where=str(place), why="A result begins with a brace.", fix=fix)
    document = json_document(content, place)
    if not isinstance(document, dict):
        raise RecordError(f"{place} holds no result.", where=str(place), why="A result is one JSON object.")
    if {"run", "steps"} <= document.keys():
        return own_result(document, place)
    return read_legacy(document, place, content)


PROBES_FILE = "probes.jsonl"


def check_probes(named: Sequence[Path]) -> tuple[Path, ...]:
    """Return the given places, each of which must hold probes."""
    for place in named:
        if not any(file.is_file() for file in _files_of(place)) and not _is_packed(place):
            what = f"There is no {PROBES_FILE} in {place}."
            raise RecordError(what, where="--probes", fix="python3 -m tprimat probe gemm writes it")
    return tuple(named)


def probes_in(paths: Iterable[Path]) -> tuple[list[ProbeRecord], list[RecordError]]:
    """Read all probes in some folders and archives, next to result files and above run folders; and what is damaged."""
    probes: list[ProbeRecord] = []
    problems: list[RecordError] = []
    places = list(dict.fromkeys(paths))
    for file in dict.fromkeys(Path(os.path.realpath(file)) for place in places for file in _files_of(place)):
        try:
            probes += read_probes(file)
        except RecordError as error:
            problems.append(error)
    for archive in filter(_is_packed, places):
        with contextlib.suppress(RecordError), unpacked(archive) as folder:  # the reader of its results reports damage
            probes += [probe for file in sorted(folder.rglob(PROBES_FILE)) for probe in read_probes(file)]
    return probes, problems


def _is_packed(place: Path) -> bool:
    return is_archive(place) and place.is_file()


def _files_of(place: Path) -> Iterator[Path]:
    """Yield the possible files of probes for a place of results; they need not exist."""
    if place.is_dir():
        yield from sorted(place.rglob(PROBES_FILE))
        if (place / "run.json").is_file():
            yield place.parent.parent / PROBES_FILE
    elif not _is_packed(place):
        yield place.parent / PROBES_FILE


# Archives: results in one .tar.gz, reproducible, and readable without unpacking.

SUFFIXES = (".tar.gz", ".tgz")
RESULTS = ("run.json", "steps.jsonl", "telemetry.jsonl", "probes.jsonl", *RESULT_FILES)
"""Files that results are read from; nothing else is unpacked."""
ANOTHER_TMPDIR = "TMPDIR=FOLDER in front of the command, where there is room"


def is_archive(path: Path) -> bool:
    """Whether a path has an archive's suffix."""
    return path.name.endswith(SUFFIXES)


@contextlib.contextmanager
def unpacked(path: Path, most: int | None = None) -> Iterator[Path]:
    """Unpack the results of an archive into a temporary folder: regular files only, and none outside the folder (PEP 706).

    `most` bytes; by default as its size allows. What is damaged, too large or leads outside is refused, as where there is no
    room.
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
                for number, _ in enumerate(iter(lambda: packed.read(1 << 20), b"")):  # the checksum stands at the end
                    if number > FREE_OF_RATIO >> 20:
                        raise RecordError(f"{path} has data after the end of its archive.", where=str(path))
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
    """Write names with their texts; the archive replaces the target when it is complete. The same files give the same bytes."""
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
