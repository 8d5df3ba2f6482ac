"""Run probes: in this process, on several ranks of this machine, or several in order, each in its own process; and their page."""

import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.core.accelerators import PLATFORM_OF
from tprimat.core.errors import ConfigError, UserError
from tprimat.engines.base import Command
from tprimat.hardware.nodes import this_machine
from tprimat.launch.command import python_environment, run_command, run_ranks
from tprimat.records.discover import PROBES_FILE
from tprimat.records.lock import locked
from tprimat.records.schema import ProbeRecord
from tprimat.records.store import append_probe, from_json, read_probes, write_atomically
from tprimat.report.probes import page

if TYPE_CHECKING:
    from tprimat.config.schema import Config
    from tprimat.core.accelerators import PlatformName
    from tprimat.probe.case import Bench
    from tprimat.probe.gemm import ModelProducts

KINDS = ("gemm", "memory", "attention", "mlp", "transformer", "collectives", "ddp")
"""In order. The probes that other results are compared with come first, in case the time runs out."""
RANK_KINDS = ("collectives", "ddp", "overlap")
"""Measured on several ranks."""
ON_REQUEST = ("rounds", "pieces", "overlap")
"""Not in `all`: rounds keep a GPU at full load for minutes, and only predictions need pieces and overlap."""
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
"""Of matrix products."""
RANKS_ON_A_PROCESSOR = 2
PAGE_NAME = "probes.md"


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
    """Split a comma-separated list of probes; `all` is KINDS.

    Raises:
        ConfigError: one of them does not exist.
    """
    return KINDS if text == "all" else _names(text, (*KINDS, *ON_REQUEST), "probe", "--probe", ", or all")


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of dtypes of matrix products.

    Raises:
        ConfigError: one of them does not exist.
    """
    return _names(text, DTYPES, "dtype", "--dtype")


def _names(text: str, known: tuple[str, ...], what: str, where: str, more: str = "") -> tuple[str, ...]:
    fix = f"one or more of {', '.join(known)}{more}"
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in known:
            raise ConfigError(f"There is no {what} {name!r}.", where=where, fix=fix)
    if not names:
        raise ConfigError(f"No {what} is named.", where=where, fix=fix)
    return names


def tell(text: str) -> None:
    """Print progress to stderr, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def require_torch() -> None:
    """Check that torch is installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("Probes need PyTorch.", fix="pip install torch, in the build for your accelerator")


def measure(request: ProbeRequest) -> Iterator[ProbeRecord]:
    """Measure the requested probes; of several, each in its own process, and a failure ends no other.

    Raises:
        LaunchError: another launcher is writing to the output folder.
        ConfigError: a single probe cannot be measured here.
        SystemExit: a signal asked for an end.
    """
    ends = None if request.seconds is None else time.monotonic() + request.seconds
    several = len(request.kinds) > 1
    with locked(request.output):
        for kind in request.kinds:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            if several and left == 0:
                tell(f"{kind}: skipped, the time budget is spent")
                continue
            try:
                if kind in RANK_KINDS:
                    yield from measure_on_ranks(kind, request, left)
                else:
                    yield from (measure_apart if several else measure_here)(kind, request, left)
            except UserError as error:
                if not several:
                    raise
                tell(f"{kind}: {error}")


def measure_here(kind: str, request: ProbeRequest, seconds: float | None) -> Iterator[ProbeRecord]:
    """Measure one probe in this process, on one device; matrix products are those of a configuration's models.

    Raises:
        ConfigError: the file is not a valid configuration.
    """
    from tprimat.config.load import read_config
    from tprimat.probe import case, catalogue

    bench = shared_bench(request.small)
    models = models_of(read_config(request.config).config, PLATFORM_OF[bench.machine.platform])
    log = case.open_log(request.file, resume=request.resume, seconds=seconds, tell=tell)
    yield from catalogue.records(kind, catalogue.Choice(dtypes=request.dtypes, models=models), bench, log)


@lru_cache(maxsize=1)
def shared_bench(small: bool | None) -> "Bench":
    """Open one bench for all probes."""
    from tprimat.probe import case

    return case.open_bench(small=small, detected=this_machine())


def measure_apart(kind: str, request: ProbeRequest, seconds: float | None) -> Iterator[ProbeRecord]:
    """Measure one probe in its own process, so that its crash ends no other and its memory is free afterwards."""
    argv = (sys.executable, "-m", "tprimat", "probe", *words_of(kind, request, seconds), "--json")
    records: list[ProbeRecord] = []

    def read(line: str) -> None:
        if line.startswith("{"):
            records.append(from_json(ProbeRecord, line, where=kind))
        else:
            tell(line)

    ending = run_command(Command(argv=argv, environment=python_environment()), read)
    yield from records
    if ending.stop_signal:
        raise SystemExit(128 + ending.stop_signal)
    if ending.exit_code:
        tell(f"{kind} ended with status {ending.exit_code}; its measurements so far are kept")


def measure_on_ranks(kind: str, request: ProbeRequest, seconds: float | None) -> Iterator[ProbeRecord]:
    """Measure one probe in processes started by torchrun, one per rank; they append to the same file."""
    from tprimat.probe import case, catalogue

    known = case.open_log(request.file, resume=request.resume, seconds=None, tell=tell).known
    for ranks in rank_counts(kind, request.ranks):
        if known:
            bench = case.open_bench(small=request.small, ranks=ranks, detected=this_machine())
            if all(case.identity(one, bench) in known for one in catalogue.CASES[kind](catalogue.Choice(), bench)):
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
    append_probe(request.file, replace(empty_record(case, shared_bench(request.small)), error=failure))
    tell(f"{kind} on {ranks} ranks: {failure}")


def words_of(kind: str, request: ProbeRequest, seconds: float | None) -> list[str]:
    """Return the words after `tprimat probe` that measure one probe of a request in another process."""
    words = [kind, "--output", str(request.output)]
    words += ["--time-budget", str(seconds)] if seconds is not None else []
    words += ["--ranks", str(request.ranks)] if request.ranks and kind in RANK_KINDS else []
    words += ["--dtype", ",".join(request.dtypes)] if request.dtypes else []
    words += ["--config", str(request.config)] if request.config else []
    words += ["--resume"] if request.resume else []
    return words + ([] if request.small is None else ["--no-full" if request.small else "--full"])


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
    """Measure as one of the ranks that torchrun started; the first one keeps the records."""
    from tprimat.probe import case, catalogue, collectives

    with collectives.process_group(request.small, this_machine()) as bench:
        log = case.open_log(None, resume=False, seconds=None, tell=lambda _: None)
        if collectives.is_first():
            log = case.open_log(request.file, resume=request.resume, seconds=request.seconds, tell=tell)
        for kind in request.kinds:
            for _ in catalogue.records(kind, catalogue.Choice(), bench, log):
                pass


def models_of(config: "Config", platform: "PlatformName") -> "tuple[ModelProducts, ...]":
    """Return each model of --model all at every tensor-parallel degree and micro-batch that its strategies use on a platform."""
    from tprimat.plan.build import shape_of
    from tprimat.probe.gemm import ModelProducts

    data = config.training.data
    products = []
    for key, model in config.models.items():
        strategies = (models[key][platform] for models in config.parallelism.values() if platform in models.get(key, {}))
        sizes = {(one.micro_batch_size or data.micro_batch_size, one.tensor_model_parallel_size) for one in strategies}
        products += [
            ModelProducts(
                model=key,
                shape=shape_of(model, "full"),
                tensor_parallel=ranks,
                micro_batch=micro_batch,
                sequence=data.sequence_length,
            )
            for micro_batch, ranks in sorted(sizes if model.in_all else ())
        ]
    return tuple(products)


def write_page(request: ProbeRequest) -> Path | None:
    """Write the page about all records of an output folder; None where there are none."""
    if not (probes := read_probes(request.file)):
        return None
    target = request.output / PAGE_NAME
    write_atomically(target, page(probes))
    return target
