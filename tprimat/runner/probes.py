"""Run probes: in this process, on several ranks of this machine, or all in order as the suite, each in its own process."""

import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.core.accelerators import PLATFORM_OF
from tprimat.core.errors import ConfigError, RecordError
from tprimat.engines.base import Command
from tprimat.hardware.nodes import this_machine
from tprimat.launch.command import python_environment, run_command, run_ranks
from tprimat.records.discover import PROBES_FILE
from tprimat.records.lock import locked
from tprimat.records.store import append_probe, read_probes, write_atomically
from tprimat.report.suite import page

if TYPE_CHECKING:
    from tprimat.config.schema import Config
    from tprimat.core.accelerators import PlatformName
    from tprimat.probe.case import Bench
    from tprimat.probe.gemm import Workload
    from tprimat.records.schema import ProbeRecord

KINDS = ("gemm", "memory", "attention", "mlp", "transformer", "collectives", "ddp")
"""In order. The probes that other results are compared with come first, in case the time runs out."""
RANK_KINDS = ("collectives", "ddp", "overlap")
"""Measured on several ranks."""
ON_REQUEST = ("rounds", "pieces", "overlap")
"""Not in `all`: rounds keep a GPU at full load for minutes, and only predictions need pieces and overlap."""
OF_PRODUCTS = ("gemm", "rounds")
"""With a choice of dtype."""
RANKS_ON_A_PROCESSOR = 2
DEFAULT_MICRO_BATCH = 4
"""For models whose micro-batch is 'auto'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to measure, and where the records go."""

    kinds: tuple[str, ...]
    output: Path
    small: bool | None
    """Sizes for a processor; None: if the device is one."""
    seconds: float | None
    """Time budget: no measurement starts after it."""
    dtypes: tuple[str, ...] | None = None
    """Of matrix products; None: all that the device multiplies."""
    config: Path | None = None
    """Configuration whose models' products are measured; None: TPrimat's own."""
    ranks: int | None
    """None: every GPU, or RANKS_ON_A_PROCESSOR."""
    resume: bool

    @property
    def file(self) -> Path:
        """Where the records are kept."""
        return self.output / PROBES_FILE


def parse_kinds(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of probes.

    Raises:
        ConfigError: one of them does not exist.
    """
    if text == "all":
        return KINDS
    fix = f"one or more of {', '.join((*KINDS, *ON_REQUEST))}, or all"
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in {*KINDS, *ON_REQUEST}:
            raise ConfigError(f"There is no probe {name!r}.", where="--probe", fix=fix)
    if not names:
        raise ConfigError("No probe is named.", where="--probe", fix=fix)
    return names


def tell(text: str) -> None:
    """Print progress to stderr, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def require_torch() -> None:
    """Check that torch is installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("Probes need PyTorch.", fix="pip install torch, in the build for your accelerator")


def measure(request: ProbeRequest) -> Iterator["ProbeRecord"]:
    """Measure every requested probe, record by record.

    Raises:
        LaunchError: another launcher is writing to the output folder.
    """
    deadline = None if request.seconds is None else time.monotonic() + request.seconds
    with locked(request.output):
        for kind in request.kinds:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            yield from measure_on_ranks(kind, request, left) if kind in RANK_KINDS else measure_here(kind, request, left)


def measure_here(kind: str, request: ProbeRequest, seconds: float | None) -> Iterator["ProbeRecord"]:
    """Measure one probe in this process, on one device; matrix products are those of a configuration's models.

    Raises:
        ConfigError: the file is not a valid configuration.
    """
    from tprimat.config.load import read_config
    from tprimat.probe import case, catalogue

    bench = shared_bench(request.small)
    workloads = workloads_of(read_config(request.config).config, PLATFORM_OF[bench.machine.platform])
    choice = catalogue.Choice(dtypes=catalogue.check_dtypes(request.dtypes or default_dtypes(kind, bench)), workloads=workloads)
    log = case.open_log(request.file, resume=request.resume, seconds=seconds, tell=tell)
    yield from catalogue.PROBES[kind](choice, bench, log)
    case.release(bench)


def default_dtypes(kind: str, bench: "Bench") -> tuple[str, ...]:
    """Return the dtypes of matrix products that the device multiplies, and say which are left out."""
    from tprimat.probe import gemm

    if bench.machine.platform != "cpu":
        return gemm.DTYPES
    if kind in OF_PRODUCTS:
        tell(f"{kind}: {' and '.join(gemm.NOT_ON_A_CPU)} are left out, which a CPU does not multiply.")
    return tuple(dtype for dtype in gemm.DTYPES if dtype not in gemm.NOT_ON_A_CPU)


@lru_cache(maxsize=1)
def shared_bench(small: bool | None) -> "Bench":
    """Open one bench for all probes."""
    from tprimat.probe import case

    return case.open_bench(small=small, detected=this_machine())


def measure_on_ranks(kind: str, request: ProbeRequest, seconds: float | None) -> Iterator["ProbeRecord"]:
    """Measure one probe in processes started by torchrun, one per rank; they append to the same file."""
    from tprimat.probe import case, collectives

    known = case.open_log(request.file, resume=request.resume, seconds=None, tell=tell).known
    for ranks in rank_counts(kind, request.ranks):
        if known and collectives.all_measured(kind, ranks, known, small=request.small, detected=this_machine()):
            tell(f"{kind} on {ranks} ranks: everything is measured already.")
            continue
        if seconds is not None and seconds <= 0:
            tell(f"The time budget is spent: {kind} on {ranks} ranks is left.")
            return
        before, began = len(read_probes(request.file)), time.monotonic()
        failure = run_ranks("tprimat", ["probe", *words_of(kind, request, seconds)], ranks, tell)
        if failure:
            record_failure(kind, ranks, failure, request)
        yield from read_probes(request.file)[before:]
        seconds = None if seconds is None else seconds - (time.monotonic() - began)


def record_failure(kind: str, ranks: int, failure: str, request: ProbeRequest) -> None:
    """Write a record for ranks that failed; what they had measured before is kept."""
    from tprimat.probe.case import Case, empty_record

    case = Case(kind=kind, shape={"ranks": ranks}, dtype="bf16", prepare=lambda _: lambda: None)
    record = replace(empty_record(case, shared_bench(request.small)), error=failure)
    append_probe(request.file, record)
    tell(f"{kind} on {ranks} ranks: {failure}")


def words_of(kind: str, request: ProbeRequest, seconds: float | None) -> list[str]:
    """Return the words after `tprimat probe` that measure one probe of a request in another process."""
    words = [kind, "--output", str(request.output)]
    words += ["--time-budget", str(seconds)] if seconds is not None else []
    words += ["--ranks", str(request.ranks)] if request.ranks and kind in RANK_KINDS else []
    words += ["--resume"] if request.resume else []
    return words + ([] if request.small is None else ["--small" if request.small else "--full"])


def rank_counts(kind: str, requested: int | None) -> list[int]:
    """Return the numbers of ranks to measure: all of them for collectives and overlap; 1, 2, 4 and so on, and all for DDP.

    Raises:
        ConfigError: there are more ranks than GPUs, or only one rank for a collective.
    """
    from tprimat.probe.device import visible_gpus

    gpus = visible_gpus()
    ranks = requested or gpus or RANKS_ON_A_PROCESSOR
    if gpus and ranks > gpus:
        raise ConfigError(f"{ranks} ranks need {ranks} GPUs, but {gpus} are visible.", where="--ranks", fix=f"--ranks {gpus}")
    if kind == "ddp":
        return sorted({count for count in (1, 2, 4, 8) if count <= ranks} | {ranks})
    if ranks < 2:
        raise ConfigError("A collective operation needs 2 ranks.", why=f"{gpus} GPU is visible.", fix=f"leave {kind} out")
    return [ranks]


def measure_as_rank(request: ProbeRequest) -> None:
    """Measure as one of the ranks that torchrun started."""
    from tprimat.probe import case, collectives

    with collectives.process_group(request.small, this_machine()) as bench:
        log = case.open_log(request.file, resume=request.resume, seconds=request.seconds, tell=tell)
        for kind in request.kinds:
            collectives.run_on_all_ranks(kind, bench, log)


def workloads_of(config: "Config", platform: "PlatformName") -> "tuple[Workload, ...]":
    """Return each model of --model all at every tensor-parallel degree and micro-batch that its strategies use on a platform."""
    from tprimat.plan.build import shape_of
    from tprimat.probe.gemm import Workload

    data = config.training.data
    workloads = []
    for key, model in config.models.items():
        if not model.in_all:
            continue
        degrees: dict[int, set[int]] = {}
        for layout in (models[key][platform] for models in config.parallelism.values() if platform in models.get(key, {})):
            micro_batch = layout.micro_batch_size or data.micro_batch_size
            sequences = DEFAULT_MICRO_BATCH if micro_batch == "auto" else micro_batch
            degrees.setdefault(sequences, set()).add(layout.tensor_model_parallel_size)
        workloads += [
            Workload(
                model=key,
                shape=shape_of(model, "full"),
                tensor_parallel=tuple(sorted(ranks)),
                micro_batch=sequences,
                sequence=data.sequence_length,
            )
            for sequences, ranks in sorted(degrees.items())
        ]
    return tuple(workloads)


# The suite: every probe in order, each in its own process, and one page from the records.

PAGE_NAME = "suite.md"


def probes_to_skip(text: str) -> frozenset[str]:
    """Read a comma-separated list of probes.

    Raises:
        ConfigError: a probe of this name does not exist.
    """
    names = frozenset(filter(None, (part.strip() for part in text.split(","))))
    for name in sorted(names):
        if name not in KINDS:
            raise ConfigError(f"There is no probe {name!r}.", where="--skip", fix=", ".join(KINDS))
    return names


def run_suite(request: ProbeRequest) -> int | None:
    """Run the probes of a request, each in its own process, so that a crash ends no other.

    Returns:
        the signal that stopped it; None at its end.

    Raises:
        LaunchError: another launcher is writing to the output folder.
    """
    ends = None if request.seconds is None else time.monotonic() + request.seconds
    with locked(request.output):
        for kind in KINDS:
            left = None if ends is None else ends - time.monotonic()
            if kind not in request.kinds:
                tell(f"{kind}: skipped")
                continue
            if left is not None and left <= 0:
                tell(f"{kind}: skipped, the time budget is spent")
                continue
            tell(f"{kind}:")
            argv = (sys.executable, "-m", "tprimat", "probe", *words_of(kind, request, left), "--json")
            ending = run_command(
                Command(argv=argv, environment=python_environment()), lambda line: None if line.startswith("{") else tell(line)
            )
            if ending.exit_code:
                tell(f"{kind} ended with status {ending.exit_code}; its measurements so far are kept")
            if ending.stop_signal:
                return ending.stop_signal
    return None


def write_page(output: Path) -> Path:
    """Write the page from the records of an output folder.

    Raises:
        RecordError: there is no record.
    """
    file = output / PROBES_FILE
    probes = read_probes(file)
    if not probes:
        raise RecordError(f"{file} holds no measurement.", where=str(file), fix="run the suite without --page-only")
    target = output / PAGE_NAME
    write_atomically(target, page(probes))
    return target
