"""Which probes there are, and what each measures with the options that a user gave."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tprimat.errors import ConfigError
from tprimat.probe import gemm, gemm_search, memory
from tprimat.probe.case import Bench, Notebook, run
from tprimat.record.schema import ProbeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure."""

    dtypes: tuple[str, ...] = gemm.DTYPES


def gemm_records(choice: Choice, bench: Bench, notebook: Notebook) -> Iterator[ProbeRecord]:
    """The search first, since the ceiling is what other results are held against, then the tables."""
    for dtype in gemm_search.SEARCHED_DTYPES:
        if dtype in choice.dtypes:
            yield from gemm_search.search(dtype, bench, notebook)
    cases = gemm.seed_cases(choice.dtypes, small=bench.small)
    cases += gemm.library_cases(bench.machine.platform, choice.dtypes, small=bench.small)
    yield from run(cases, bench, notebook)


def memory_records(choice: Choice, bench: Bench, notebook: Notebook) -> Iterator[ProbeRecord]:
    """Copy, triad and fill; they have one dtype."""
    yield from run(memory.cases(small=bench.small), bench, notebook)


Probe = Callable[[Choice, Bench, Notebook], Iterator[ProbeRecord]]

PROBES: dict[str, Probe] = {"gemm": gemm_records, "memory": memory_records}
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
