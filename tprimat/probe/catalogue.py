"""Which probes there are, and what each measures with the options that a user gave."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tprimat.errors import ConfigError
from tprimat.probe import attention, gemm, gemm_search, memory, mlp, transformer
from tprimat.probe import gemm as gemm_models
from tprimat.probe.case import Bench, Case, Notebook, run
from tprimat.records.schema import ProbeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure."""

    dtypes: tuple[str, ...] = gemm.DTYPES
    workloads: tuple[gemm_models.Workload, ...] = gemm_models.DEFAULT_WORKLOADS


def gemm_records(choice: Choice, bench: Bench, notebook: Notebook) -> Iterator[ProbeRecord]:
    """The search first, since the ceiling is what other results are held against, then the tables."""
    for dtype in gemm_search.SEARCHED_DTYPES:
        if dtype in choice.dtypes:
            yield from gemm_search.search(dtype, bench, notebook)
    cases = gemm.seed_cases(choice.dtypes, small=bench.small)
    cases += gemm_models.cases(choice.workloads, choice.dtypes, small=bench.small)
    cases += gemm.library_cases(bench.machine.platform, choice.dtypes, small=bench.small)
    yield from run(cases, bench, notebook)


Cases = Callable[..., list[Case]]


def records_of(cases: Cases) -> "Probe":
    """The probe of a module that has one list of cases and no choice of dtype."""

    def measure_all(choice: Choice, bench: Bench, notebook: Notebook) -> Iterator[ProbeRecord]:
        yield from run(cases(small=bench.small), bench, notebook)

    return measure_all


Probe = Callable[[Choice, Bench, Notebook], Iterator[ProbeRecord]]

PROBES: dict[str, Probe] = {
    "gemm": gemm_records,
    "attention": records_of(attention.cases),
    "memory": records_of(memory.cases),
    "mlp": records_of(mlp.cases),
    "transformer": records_of(transformer.cases),
}
"""Those that one process measures on one device."""


def check_dtypes(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names as given.

    Raises:
        ConfigError: one of them is not a dtype of a matrix product.
    """
    for name in names:
        if name not in gemm.DTYPES:
            raise ConfigError(
                f"{name} is not a dtype that can be probed.", where="--dtype", fix="one or more of " + ", ".join(gemm.DTYPES)
            )
    return names
