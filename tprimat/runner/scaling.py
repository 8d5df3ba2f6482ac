"""Weak and strong scaling: runs of one strategy on rising numbers of GPUs, or a printed table of such runs."""

import csv
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tprimat.analyze.groups import Measured, group_runs
from tprimat.analyze.scaling import LeftOut, Point, Series, fit, series, series_of, short_name
from tprimat.core.errors import ConfigError, LayoutError, MetricError, RecordError
from tprimat.records.discover import PROBES_FILE
from tprimat.records.schema import Estimate
from tprimat.records.store import read_text
from tprimat.report.catalogue import per_rank
from tprimat.report.comparison import run_name
from tprimat.report.scaling import FittedSeries
from tprimat.runner.request import RunRequest
from tprimat.runner.session import Session, prepare

ScalingMode = Literal["weak", "strong"]


def parse_scaling(text: str) -> tuple[list[int], ScalingMode]:
    """Parse '1,2,4,8' or 'strong:1,2,4,8' as rising numbers of GPUs and how they scale.

    Raises:
        ConfigError: something else, or a single number.
    """
    mode, _, counts = text.rpartition(":")
    words = [word.strip() for word in counts.split(",")]
    if mode not in {"", "weak", "strong"} or not all(word.isdigit() and int(word) > 0 for word in words) or len(set(words)) < 2:
        why = "It takes two or more numbers of GPUs, after weak: or strong: where the mode is named."
        raise ConfigError(f"--scaling is {text!r}.", where="--scaling", why=why, fix="--scaling 1,2,4,8 or strong:1,2,4,8")
    return sorted({int(word) for word in words}), "strong" if mode == "strong" else "weak"


def scaling_sessions(request: RunRequest, counts: Sequence[int], mode: ScalingMode) -> list[Session]:
    """Prepare one session for each number of GPUs, with results in gpus-N of the output folder.

    Weak scaling keeps the work of each GPU: the configured global batch is that of the largest number, smaller numbers get their
    share. Strong scaling divides the same batch.

    Raises:
        UserError: the strategy cannot run on one of the numbers; nothing has been started.
    """
    largest = _prepared(at_largest(request, counts), counts, mode)
    whole = largest.plans[0].workload.global_batch_sequences
    probes = (*request.probes, *filter(Path.is_file, [largest.output / PROBES_FILE]))
    requests = [
        dataclasses.replace(
            request,
            gpus=gpus,
            global_batch_size=whole if mode == "strong" else batch_share(whole, gpus, counts[-1], largest.platform),
            output=largest.output / f"gpus-{gpus}",
            probes=probes,
        )
        for gpus in counts
    ]
    return [_prepared(one, counts, mode) for one in requests]


def at_largest(request: RunRequest, counts: Sequence[int]) -> RunRequest:
    """Return the request for the largest number of GPUs.

    Raises:
        ConfigError: it names a number of GPUs itself.
    """
    if request.gpus is not None:
        raise ConfigError("--gpus and --scaling exclude each other.", where="--gpus", fix="leave --gpus out")
    return dataclasses.replace(request, gpus=counts[-1])


def _prepared(request: RunRequest, counts: Sequence[int], mode: ScalingMode) -> Session:
    """Prepare one session. A batch that one number of GPUs cannot divide is mended for all of them, not for that one alone."""
    try:
        return prepare(request)
    except LayoutError as error:
        if mode == "weak" or not error.what.startswith("global batch size"):
            raise
        batch = f"--global-batch-size with a multiple of {math.lcm(*counts)} micro-batches, which suits all the numbers"
        raise LayoutError(error.what, where=error.where, why=error.why, fix=f"{batch}; or weak scaling") from error


def batch_share(whole: int, gpus: int, largest: int, platform: str) -> int:
    """Return the global batch of a smaller number of GPUs, in sequences.

    Raises:
        ConfigError: it is not a whole number of sequences.
    """
    if whole * gpus % largest:
        raise ConfigError(
            per_rank(f"A global batch of {whole} sequences on {largest} GPUs leaves no whole number for {gpus}.", {platform}),
            where="--scaling",
            why=per_rank("Weak scaling gives every GPU the same work.", {platform}),
            fix=f"--global-batch-size {max(1, whole // largest) * largest}, or --scaling strong:1,2,4,8",
        )
    return whole * gpus // largest


def fit_series(series: Sequence[Series]) -> list[FittedSeries]:
    """Fit the laws that the points of each series allow."""
    return [
        FittedSeries(series=one, fits=[law for law in (fit(one, "Amdahl"), fit(one, "USL")) if law is not None]) for one in series
    ]


def scaling_of(measured: Sequence[Measured]) -> list[FittedSeries]:
    """Find every scaling series among some runs.

    Raises:
        MetricError: no configuration ran on two numbers of GPUs.
    """
    found = series_of(group_runs(measured))
    if found and (lost := [item for item in measured if item.not_counted is not None]):
        more = tuple(
            LeftOut(
                label=run_name(item),
                gpus=item.result.run.machine.gpus,
                why=f"not counted, {item.not_counted}",
                name=short_name(item.result.run),
                reason="that did not count",
            )
            for item in lost
        )
        found[0] = dataclasses.replace(found[0], left_out=(*found[0].left_out, *more))
    if not found:
        counted = sum(item.not_counted is None for item in measured)
        raise MetricError(
            per_rank("No configuration ran on two numbers of GPUs.", {item.result.run.machine.platform for item in measured}),
            why=f"{counted} of {len(measured)} runs count.",
            fix="run the same strategy with --gpus 1, 2, 4 and 8",
        )
    return fit_series(found)


# A printed table of throughput over GPUs.

COLUMNS = {
    "configuration": "configuration",
    "gpus": "gpus",
    "nodes": "nodes",
    "total tokens": "tokens",
    "total tokens processed": "tokens",
    "overall throughput": "rate",
    "tokens per second": "rate",
    "throughput per gpu": "per_gpu",
    "tokens per second per gpu": "per_gpu",
    "elapsed time s": "seconds",
    "elapsed seconds": "seconds",
}
"""Heading, in small letters and without units in brackets -> what it holds. Other columns are passed over."""
CONFIGURATION = re.compile(r"(\d+) GPUs? (?:across|on) (\d+) nodes?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Printed:
    """A number as a table prints it: it stands for everything that rounds to it."""

    low: float
    high: float

    def times(self, factor: float) -> "Printed":
        """The same in other units."""
        return Printed(self.low * factor, self.high * factor)


def read_scaling_table(path: Path) -> Series:
    """Read a series from a CSV file with one line per number of GPUs.

    Raises:
        RecordError: no such file, a column or number is missing, columns contradict each other, or there are too few lines.
    """
    lines = list(csv.reader(read_text(path).splitlines()))
    if not lines:
        raise RecordError(f"{path} is empty.", where=str(path), fix="a heading and a line for each number of GPUs")
    header = [COLUMNS.get(_plain(name), "") for name in lines[0]]
    points = []
    for number, line in enumerate(lines[1:], 2):
        if any(cell.strip() for cell in line):
            cells = {name: cell.strip() for name, cell in zip(header, line, strict=False) if name and cell.strip()}
            points.append(_point(cells, f"{path}:{number}"))
    try:
        return series(path.stem, points, [point.tokens for point in points])
    except MetricError as error:
        raise RecordError(error.what, where=str(path), why=error.why) from error


def _plain(heading: str) -> str:
    """'Elapsed Time (s)' -> 'elapsed time s', 'Overall Throughput (tokens/sec)' -> 'overall throughput'."""
    words = heading.strip().lower().replace("_", " ").replace("(s)", "s")
    return re.sub(r"\s*\(.*?\)", "", words).strip()


def _point(cells: Mapping[str, str], where: str) -> Point:
    gpus, nodes = _size(cells, where)
    numbers = {name: _printed(cells[name], where) for name in ("tokens", "rate", "per_gpu", "seconds") if name in cells}
    tokens = numbers.get("tokens")
    total = None if tokens is None else (tokens.low + tokens.high) / 2
    rate = _rate(numbers, total, gpus, where)
    return Point(
        gpus=gpus,
        nodes=nodes,
        tokens_per_second=Estimate(value=rate, low=None, high=None, samples=1),
        tokens=total,
    )


def _size(cells: Mapping[str, str], where: str) -> tuple[int, int | None]:
    found = CONFIGURATION.search(cells.get("configuration", ""))
    words = found.groups() if found else (cells.get("gpus", ""), cells.get("nodes"))
    if not words[0].isdigit() or int(words[0]) < 1:
        what = "No number of GPUs."
        raise RecordError(what, where=where, fix="a column gpus, or configuration such as '8 GPUs across 2 nodes'")
    return int(words[0]), int(words[1]) if words[1] and words[1].isdigit() else None


def _printed(text: str, where: str) -> Printed:
    """'1,312.90' -> 1312.895 to 1312.905."""
    plain = text.replace(",", "").replace(" ", "")
    try:
        value = float(plain)
    except ValueError:
        raise RecordError(f"{text!r} is not a number.", where=where) from None
    if not 0 < value < float("inf"):
        raise RecordError(f"{text!r} is not a positive number.", where=where)
    half = 0.5 * 10.0 ** -len(plain.partition(".")[2])
    return Printed(value - half, value + half)


def _rate(numbers: Mapping[str, Printed], tokens: float | None, gpus: int, where: str) -> float:
    """The throughput that all columns round to: the middle of what they leave open together."""
    found = [numbers["rate"]] if "rate" in numbers else []
    found += [numbers["per_gpu"].times(gpus)] if "per_gpu" in numbers else []
    if tokens is not None and "seconds" in numbers:
        seconds = numbers["seconds"]
        found.append(Printed(tokens / seconds.high, tokens / seconds.low))
    if not found:
        raise RecordError("No throughput.", where=where, fix="a column tokens_per_second, or total_tokens beside elapsed_seconds")
    low, high = max(one.low for one in found), min(one.high for one in found)
    if low > high:
        ranges = ", ".join(f"{one.low:,.1f} to {one.high:,.1f}" for one in found)
        raise RecordError("The columns contradict each other.", where=where, why=f"They leave {ranges} tokens/s.")
    return (low + high) / 2
