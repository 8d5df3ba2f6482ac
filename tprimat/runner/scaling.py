"""Weak and strong scaling: runs of one strategy on rising numbers of GPUs, or a printed table of such runs."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tprimat.analyze.groups import Measured, group_runs
from tprimat.analyze.scaling import LeftOut, Series, series_of
from tprimat.core.errors import ConfigError, LayoutError, MetricError
from tprimat.records.discover import PROBES_FILE
from tprimat.report.catalogue import per_rank
from tprimat.report.comparison import run_name
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


def scaling_of(measured: Sequence[Measured]) -> list[Series]:
    """Find every scaling series among some runs.

    Raises:
        MetricError: no configuration ran on two numbers of GPUs.
    """
    found = series_of(group_runs(measured))
    if not found:
        counted = sum(item.not_counted is None for item in measured)
        raise MetricError(
            per_rank("No configuration ran on two numbers of GPUs.", {item.result.run.machine.platform for item in measured}),
            why=f"{counted} of {len(measured)} runs count.",
            fix="run the same strategy with --gpus 1, 2, 4 and 8",
        )
    lost = [
        LeftOut(label=run_name(item), gpus=item.result.run.machine.gpus, why=f"not counted, {item.not_counted.rstrip('.')}")
        for item in measured
        if item.not_counted is not None
    ]
    return [dataclasses.replace(found[0], left_out=(*found[0].left_out, *lost)), *found[1:]]
