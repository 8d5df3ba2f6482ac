"""Runs of one strategy on rising numbers of GPUs, and what they show: weak or strong scaling with its fitted laws."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tprimat.analyze.groups import Measured, group_runs
from tprimat.analyze.scaling import Series, fit, series_of
from tprimat.errors import ConfigError, MetricError
from tprimat.records.discover import PROBES_FILE
from tprimat.report.scaling import FittedSeries
from tprimat.runner.session import RunRequest, Session, prepare

ScalingMode = Literal["weak", "strong"]


def gpu_counts(text: str) -> list[int]:
    """Parse '1,2,4,8' as rising numbers.

    Raises:
        ConfigError: something else, or a single number.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words) or len(set(words)) < 2:
        raise ConfigError(
            f"--scaling is {text!r}.", where="--scaling", why="It takes two or more numbers.", fix="--scaling 1,2,4,8"
        )
    return sorted({int(word) for word in words})


def scaling_sessions(request: RunRequest, counts: Sequence[int], mode: ScalingMode) -> list[Session]:
    """Prepare one session for each number of GPUs, with results in gpus-N of the output folder.

    Weak scaling keeps the work of each GPU: the configured global batch is that of the largest number, smaller numbers get their
    share. Strong scaling divides the same batch.

    Raises:
        UserError: the strategy cannot run on one of the numbers; nothing has been started.
    """
    if request.gpus is not None:
        raise ConfigError("--gpus and --scaling exclude each other.", where="--gpus", fix="leave --gpus out")
    largest = prepare(dataclasses.replace(request, gpus=counts[-1]))
    whole = largest.plans[0].batch.global_batch_sequences
    probes = (*request.probes, *filter(Path.is_file, [largest.output / PROBES_FILE]))
    return [
        prepare(
            dataclasses.replace(
                request,
                gpus=gpus,
                global_batch_size=whole if mode == "strong" else batch_share(whole, gpus, counts[-1]),
                output=largest.output / f"gpus-{gpus}",
                probes=probes,
            )
        )
        for gpus in counts
    ]


def batch_share(whole: int, gpus: int, largest: int) -> int:
    """Return the global batch of a smaller number of GPUs, in sequences.

    Raises:
        ConfigError: it is no whole number of sequences.
    """
    if whole * gpus % largest:
        raise ConfigError(
            f"A global batch of {whole} sequences on {largest} GPUs leaves no whole number for {gpus}.",
            where="--scaling",
            why="Weak scaling gives every GPU the same work.",
            fix=f"--global-batch-size {max(1, whole // largest) * largest}, or --scaling-mode strong",
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
    if not found:
        counted = sum(item.not_counted is None for item in measured)
        raise MetricError(
            "No configuration ran on two numbers of GPUs.",
            why=f"{counted} of {len(measured)} runs count.",
            fix="run the same strategy with --gpus 1, 2, 4 and 8",
        )
    return fit_series(found)
