"""The probes that one process measures on one device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tprimat.core.errors import ConfigError
from tprimat.probe import attention, gemm, memory, pieces, transformer
from tprimat.probe.case import Bench, Case, ProbeLog, run
from tprimat.records.schema import ProbeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Dtypes and models of the matrix products."""

    dtypes: tuple[str, ...]
    workloads: tuple[gemm.Workload, ...]


Probe = Callable[[Choice, Bench, ProbeLog], Iterator[ProbeRecord]]


def gemm_records(choice: Choice, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Search the fastest product first, since other results are compared with it; then measure the tables."""
    for dtype in gemm.SEARCHED_DTYPES:
        if dtype in choice.dtypes:
            yield from gemm.search(dtype, bench, log)
    cases = gemm.seed_cases(choice.dtypes, small=bench.small)
    cases += gemm.model_cases(choice.workloads, choice.dtypes, small=bench.small)
    cases += gemm.library_cases(bench.machine.platform, choice.dtypes, small=bench.small)
    yield from run(cases, bench, log)


def round_records(choice: Choice, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Measure some products in several rounds, so that rates show how much they differ from one round to the next."""
    yield from run(gemm.round_cases(choice.dtypes, small=bench.small), bench, log)


def attention_records(choice: Choice, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Measure attention under every backend that torch has for the device, and say which are left out."""
    absent = attention.NOT_ON_A_CPU if bench.device.type == "cpu" else ()
    if absent:
        log.tell(f"attention: {' and '.join(absent)} are left out, which a CPU does not have.")
    backends = [name for name in attention.BACKENDS if name not in absent]
    yield from run(attention.cases(backends, small=bench.small), bench, log)


def piece_records(choice: Choice, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Measure the parts of a training step that torch has for the device, and say which are left out."""
    on_cpu = bench.device.type == "cpu"
    if on_cpu:
        log.tell("pieces: attention by cudnn and grouped products in fp8 are left out, which a CPU does not have.")
    yield from run(pieces.cases(small=bench.small, on_cpu=on_cpu), bench, log)


def probe_of(cases: Callable[..., list[Case]]) -> Probe:
    """Return the probe of a module with one list of cases and no choice of dtype."""

    def measure_all(choice: Choice, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
        yield from run(cases(small=bench.small), bench, log)

    return measure_all


PROBES: dict[str, Probe] = {
    "gemm": gemm_records,
    "rounds": round_records,
    "attention": attention_records,
    "memory": probe_of(memory.cases),
    "mlp": probe_of(transformer.mlp_cases),
    "transformer": probe_of(transformer.cases),
    "pieces": piece_records,
}


def check_dtypes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names if all are valid.

    Raises:
        ConfigError: one of them is not a dtype of a matrix product.
    """
    for name in names:
        if name not in gemm.DTYPES:
            raise ConfigError(
                f"{name} is not a dtype that can be probed.", where="--dtype", fix="one or more of " + ", ".join(gemm.DTYPES)
            )
    return names
