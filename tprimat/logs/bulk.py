"""Logs that are steps and little else, read many lines at a time: ten times faster than line by line, with the same result.

The first steps are read one by one. From one of their lines a pattern is made that only lines of the same shape match: the same
names in the same order, one plain number each. Everything else, and every line in which something changes that is no plain
number of a step, is left for the slow way.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tprimat.logs.steps import LARGEST, LOGGED_ROW
from tprimat.records.steps import ABSENT
from tprimat.records.table import Rows

MOST_LINES = 4000
NUMBERS = {
    "elapsed time per iteration (ms)": ("seconds", 1e-3),
    "lm loss": ("loss", 1.0),
    "loss": ("loss", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "learning rate": ("learning_rate", 1.0),
}
"""Megatron-LM's names -> column and unit."""
CONSTANT = ("global batch size",)
COUNTS = ("number of skipped iterations", "number of nan iterations")
SLOW = ("tokens per GPU (tokens/s/GPU)", "tokens/s/GPU inst/harmonic mean")
"""Names that the slow way reads, so that a line with one of them is none for the fast way."""
HEAD = re.compile(r"iteration\s+\d+/\s*\d+")
START = r"[^|\n]*?iteration +(?P<step>\d{1,15})/ *(?P<total>\d{1,15}) \|"
VALUE = r" +{name}: +(?P<{group}>[-+.\w]+) \|"


def line_pattern(text: str) -> re.Pattern[str] | None:
    """What lines of the shape of this one match; None where the line is not of a shape that can be read fast."""
    head = HEAD.search(text)
    if head is None or "|" in text[: head.start()] or "\x1b" in text:
        return None
    parts, known = [START], {*NUMBERS, *CONSTANT, *COUNTS}
    for part in text[head.end() :].split("|")[1:-1]:
        name = part.rpartition(": ")[0].strip()
        if name in SLOW or not name:
            return None
        group = re.sub(r"\W", "_", name)
        parts.append(VALUE.format(name=re.escape(name), group=group) if name in known else rf" +{re.escape(name)}: +[^|\n]*\|")
    try:
        pattern = re.compile("".join(parts) + r"\s*")
    except re.error:  # a name twice
        return None
    return pattern if pattern.fullmatch(text) and "elapsed_time_per_iteration__ms_" in pattern.groupindex else None


def rows_of_lines(pattern: re.Pattern[str], lines: Iterator[str], said: Mapping[str, Any], newest: int) -> Rows | None:
    """The rows of the first lines that match, up to MOST_LINES.

    Args:
        pattern: of `line_pattern`.
        lines: what to read.
        said: total_steps and global_batch_sequences, as known so far.
        newest: step before the first line.

    Returns:
        None: no line matches, or the matching ones say something that is not plain progress.
    """
    matches = takewhile(bool, map(pattern.fullmatch, islice(lines, MOST_LINES)))
    groups = [match.groups() for match in matches if match]
    if not groups:
        return None
    columns = dict(zip(pattern.groupindex, zip(*groups, strict=True), strict=True))
    try:
        rows = _rows(columns)
    except ValueError:
        return None
    totals, batches = set(columns["total"]), set(columns.get("global_batch_size", ()))
    plain = {int(total) for total in totals} == {said["total_steps"]} and (
        not batches or {*map(int, batches)} == {said["global_batch_sequences"]}
    )
    steps = rows["step"]
    return rows if plain and steps[0] > newest and (np.diff(steps) > 0).all() else None


def _rows(columns: Mapping[str, Sequence[str]]) -> Rows:
    rows = np.empty(len(columns["step"]), LOGGED_ROW)
    for name in LOGGED_ROW.names or ():
        rows[name] = np.nan if LOGGED_ROW[name].kind == "f" else ABSENT
    rows["step"] = np.array(list(map(int, columns["step"])))
    rows["mean_since_reset"] = True
    rows["finite"] = True
    for name, (column, unit) in NUMBERS.items():
        if (texts := columns.get(re.sub(r"\W", "_", name))) is not None:
            values = _floats(texts) * unit
            rows["finite"] &= np.isfinite(values) | (column not in {"loss", "grad_norm"})
            rows[column] = np.where(np.isfinite(values), values, np.nan)
    for name in COUNTS:
        if (texts := columns.get(re.sub(r"\W", "_", name))) is not None:
            rows["finite"] &= _floats(texts) == 0
    if (texts := columns.get("global_batch_size")) is not None:
        rows["batch"] = int(texts[0])
    return rows if rows["step"].max() < LARGEST else rows[:0]


def _floats(texts: Sequence[str]) -> NDArray[np.float64]:
    """Raises: ValueError: one is no plain number."""
    return np.full(len(texts), float(texts[0])) if len(set(texts)) == 1 else np.array(list(map(float, texts)))
