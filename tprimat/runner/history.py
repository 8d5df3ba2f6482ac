"""The history of all records in some folders, and the gate that compares new runs with its last good ones."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tprimat.analyze.compare import Question, verdict
from tprimat.analyze.groups import Group, Measured, measure
from tprimat.analyze.history import OVER_TIME, Course, Entry, courses, entry_of
from tprimat.analyze.metrics import MetricOptions
from tprimat.core.errors import RecordError
from tprimat.records.discover import read_result
from tprimat.records.index import derived
from tprimat.records.store import from_json, to_json
from tprimat.report.comparison import Comparison

QUESTION = Question(varying=OVER_TIME)
"""What may differ between the runs of a history: that is what it is asked about."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What is known of the past."""

    courses: tuple[Course, ...]
    not_counted: tuple[Entry, ...]
    problems: tuple[str, ...]
    """Runs that could not be read."""


def derive(path: Path) -> str:
    """Return what the index holds of a run folder or result file.

    Raises:
        RecordError: it is damaged, or its name is not text.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode("utf8", "backslashreplace")
        raise RecordError(f"The name {shown} is not UTF-8 text; rename it.") from error
    return to_json(entry_of(measure(read_result(path), MetricOptions()), str(path)))


def read_history(folders: Sequence[Path]) -> History:
    """Read all runs below some folders.

    Raises:
        RecordError: there is no such folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"There is no folder {folder}.", where=str(folder), fix="a folder with runs below it")
    unique: dict[str, Entry] = {}
    problems = []
    for path, text in derived(folders, derive):
        if isinstance(text, RecordError):
            problems.append(text.what)
            continue
        entry = replace(from_json(Entry, text, where="the index"), path=str(path))  # the folder may have moved since
        unique.setdefault(entry.run_id, entry)
    return History(
        courses=tuple(courses(list(unique.values()))),
        not_counted=tuple(entry for entry in unique.values() if entry.not_counted is not None),
        problems=tuple(problems),
    )


def against_history(history: History, new: Path, last: int) -> tuple[Comparison, tuple[str, ...]]:
    """Compare each configuration of some new runs with the last good runs of the same configuration in a history.

    The new runs may be in the history as well.

    Returns:
        the comparison, and the label of each new configuration that has no past.

    Raises:
        RecordError: a run cannot be read.
    """
    fresh = read_history([new])
    known = {course.configuration: course for course in history.courses}
    groups: list[Group] = []
    verdicts = []
    alone = []
    for course in fresh.courses:
        own = {entry.run_id for entry in course.entries}
        former = known.get(course.configuration)
        past = [] if former is None else [entry for entry in former.entries if entry.run_id not in own][-last:]
        candidate = _group(f"new: {course.label}", course.entries)
        groups.append(candidate)
        if past:
            baseline = _group(f"the last {len(past)}", past)
            groups.append(baseline)
            verdicts.append(verdict(baseline, candidate, QUESTION))
        else:
            alone.append(candidate.label)
    lost = [replace(measured_again(entry), not_counted=entry.not_counted) for entry in fresh.not_counted]
    comparison = Comparison(
        groups=tuple(groups), verdicts=tuple(verdicts), not_counted=tuple(lost), asked=True, question=QUESTION
    )
    return comparison, tuple(alone)


def measured_again(entry: Entry) -> Measured:
    """Return the run of an entry with its metrics."""
    return measure(read_result(Path(entry.path)), MetricOptions())


def _group(label: str, entries: Sequence[Entry]) -> Group:
    return Group(label=label, kind=(label,), runs=tuple(map(measured_again, entries)))
