"""An index of runs in SQLite: what was derived from each, so that a tree of thousands is read once.

It holds nothing that the records do not: deleting it costs time only. A run is derived again when its files change.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tprimat.core.errors import RecordError
from tprimat.records.discover import is_result_file
from tprimat.records.environment import own_version

INDEX_FILE = ".tprimat-index.sqlite"
FILES = ("run.json", "steps.jsonl")
"""A run is derived again when one of them has another size or time."""


def derived(folders: Sequence[Path], derive: Callable[[Path], str]) -> list[tuple[Path, str | RecordError]]:
    """Return a text for each run folder and result file below some folders, from the index where it has not changed.

    Args:
        folders: to search.
        derive: makes the text from a folder or file; the version of this program belongs to the index, so it may change.
            Its error stands for the text, and is not kept: the reason may be in a file that FILES does not name.
    """
    found: list[tuple[Path, str | RecordError]] = []
    for folder in folders:
        with contextlib.closing(_opened(folder)) as index:
            known, fresh = _known(index), []
            for path in run_places(folder):
                name, stamp = os.fsencode(path.relative_to(folder)), _stamp(path)
                if name not in known or known[name][0] != stamp:
                    try:
                        known[name] = (stamp, derive(path))
                    except RecordError as error:
                        found.append((path, error))
                        continue
                    fresh.append((name, *known[name]))
                found.append((path, known[name][1]))
            with contextlib.suppress(sqlite3.Error), index:  # read-only, full, or another reader is writing it
                index.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", fresh)
    return found


def _known(index: sqlite3.Connection) -> dict[bytes, tuple[str, str]]:
    """Return path -> stamp and text; nothing where the index is damaged."""
    try:
        return {path: (stamp, text) for path, stamp, text in index.execute("SELECT path, stamp, text FROM runs")}
    except sqlite3.Error:
        return {}


def run_places(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs below a folder, by name, and then the result files, which may be copies of these."""
    files = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        if "run.json" in names:
            folders[:] = []  # node-1 and micro_batch are parts of the run
            yield Path(place)
        else:
            files += [Path(place, name) for name in names if is_result_file(name)]
    yield from sorted(files)


def _stamp(path: Path) -> str:
    parts = []
    for file in (path / name for name in FILES) if path.is_dir() else (path,):
        with contextlib.suppress(OSError):
            status = file.stat()
            parts.append(f"{status.st_size}@{status.st_mtime_ns}")
    return " ".join(parts)


def _opened(folder: Path) -> sqlite3.Connection:
    """Return the index of a folder; an empty one in memory where it cannot be written, is damaged or is of another version."""
    try:
        index = sqlite3.connect(folder / INDEX_FILE)
        index.execute("CREATE TABLE IF NOT EXISTS runs (path BLOB PRIMARY KEY, stamp TEXT NOT NULL, text TEXT NOT NULL)")
        index.execute("CREATE TABLE IF NOT EXISTS made_by (version TEXT)")
        version = own_version()
        if index.execute("SELECT version FROM made_by").fetchall() != [(version,)]:
            index.execute("DELETE FROM runs")
            index.execute("DELETE FROM made_by")
            index.execute("INSERT INTO made_by VALUES (?)", (version,))
            index.commit()
    except sqlite3.Error:
        index = sqlite3.connect(":memory:")
        index.execute("CREATE TABLE runs (path BLOB PRIMARY KEY, stamp TEXT NOT NULL, text TEXT NOT NULL)")
    return index
