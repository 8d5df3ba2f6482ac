"""Run probes, in this process or on several ranks of this machine, and write their page."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.core.accelerators import PLATFORM_OF
from tprimat.core.errors import ConfigError, UserError
from tprimat.launch.process import run_ranks
from tprimat.records.discover import PROBES_FILE
from tprimat.records.lock import locked
from tprimat.records.schema import ProbeRecord
from tprimat.records.store import append_probe, read_probes, write_atomically
from tprimat.report.probes import page
from tprimat.runner.progress import say

if TYPE_CHECKING:
    from tprimat.config.schema import Config
    from tprimat.core.accelerators import PlatformName
    from tprimat.probe.case import Bench
    from tprimat.probe.gemm import ModelProducts

KINDS = ("gemm", "memory", "attention", "mlp", "transformer", "collectives", "ddp")
RANK_KINDS = ("collectives", "ddp", "overlap")
ON_REQUEST = ("pieces", "overlap")
"""Not in `all`: only predictions need them."""
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
RANKS_ON_A_PROCESSOR = 2
PAGE_NAME = "probes.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to measure, and where the records go."""

    kinds: tuple[str, ...]
    output: Path
    dtypes: tuple[str, ...] | None = None
    ranks: int | None = None
    """None: every GPU, or RANKS_ON_A_PROCESSOR."""
    resume: bool = False

    @property
    def file(self) -> Path:
        """Where the records are kept."""
        return self.output / PROBES_FILE


def named(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Split a comma-separated list of names; of probes, `all` is KINDS."""
    names = KINDS if text == "all" else tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        said = f"There is no {what} {wrong[0]!r}." if wrong else f"No {what} is named."
        raise ConfigError(said, where="kinds" if what == "probe" else f"--{what}", fix=f"one or more of {', '.join(known)}")
    return names


def measure(request: ProbeRequest) -> Iterator[ProbeRecord]:
    """Measure the requested probes; of several, a failure ends no other."""
    with locked(request.output):
        for kind in request.kinds:
            try:
                yield from (measure_on_ranks if kind in RANK_KINDS else measure_here)(kind, request)
            except UserError as error:
                if len(request.kinds) == 1:
                    raise
                say(f"{kind}: {error}")


def measure_here(kind: str, request: ProbeRequest) -> Iterator[ProbeRecord]:
    """Measure one probe in this process, on one device; matrix products are those of config.yaml's models."""
    from tprimat.config.load import load_config
    from tprimat.probe import case, catalogue

    bench = shared_bench()
    models = models_of(load_config(), PLATFORM_OF[bench.machine.platform])
    log = case.ProbeLog(request.file, resume=request.resume, tell=say)
    yield from catalogue.records(kind, request.dtypes, models, bench, log)


@lru_cache(maxsize=1)
def shared_bench() -> "Bench":
    """Open one bench for all probes."""
    from tprimat.probe import case

    return case.open_bench()


def measure_on_ranks(kind: str, request: ProbeRequest) -> Iterator[ProbeRecord]:
    """Measure one probe in processes started by torchrun, one per rank; they append to the same file."""
    from tprimat.probe import case

    for ranks in rank_counts(kind, request.ranks):
        before = len(read_probes(request.file))
        words = ["probe", kind, "--output", str(request.output), "--ranks", str(ranks), *["--resume"] * request.resume]
        if failure := run_ranks("tprimat", words, ranks, say):
            failed = case.Case(kind=kind, shape={"ranks": ranks}, dtype="bf16", prepare=lambda _: lambda: None)
            append_probe(request.file, replace(case.empty_record(failed, shared_bench()), error=failure))
            say(f"{kind} on {ranks} ranks: {failure}")
        yield from read_probes(request.file)[before:]


def rank_counts(kind: str, requested: int | None) -> list[int]:
    """Return the numbers of ranks to measure: all of them for collectives and overlap; 1, 2, 4 and so on, and all for DDP."""
    from tprimat.probe.case import visible_gpus

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

    with collectives.process_group() as (bench, first):
        log = case.ProbeLog(request.file, resume=request.resume, tell=say) if first else case.ProbeLog(None)
        for kind in request.kinds:
            for _ in catalogue.records(kind, None, (), bench, log):
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
