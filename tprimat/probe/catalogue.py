"""Every probe and its cases: the one table from which they are measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tprimat.probe import attention, collectives, gemm, memory, pieces, transformer
from tprimat.probe.case import Bench, Case, ProbeLog, run
from tprimat.records.schema import ProbeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Dtypes and models of the matrix products."""

    dtypes: tuple[str, ...] | None = None
    """None: all that the device multiplies."""
    models: tuple[gemm.ModelProducts, ...] = ()

    def on(self, platform: str) -> tuple[str, ...]:
        """Return the dtypes to measure on a platform."""
        usable = (dtype for dtype in gemm.DTYPES if platform != "cpu" or dtype not in gemm.NOT_ON_A_CPU)
        return tuple(usable) if self.dtypes is None else self.dtypes


def _products(choice: Choice, bench: Bench) -> list[Case]:
    dtypes = choice.on(bench.machine.platform)
    return [
        *gemm.seed_cases(dtypes, small=bench.small),
        *gemm.model_cases(choice.models, dtypes, small=bench.small),
    ]


CASES: dict[str, Callable[[Choice, Bench], list[Case]]] = {
    "gemm": _products,
    "rounds": lambda choice, bench: gemm.round_cases(choice.on(bench.machine.platform), small=bench.small),
    "memory": lambda choice, bench: memory.cases(small=bench.small),
    "attention": lambda choice, bench: attention.cases(small=bench.small, on_cpu=bench.device.type == "cpu"),
    "mlp": lambda choice, bench: transformer.mlp_cases(small=bench.small),
    "transformer": lambda choice, bench: transformer.cases(small=bench.small),
    "pieces": lambda choice, bench: pieces.cases(small=bench.small, on_cpu=bench.device.type == "cpu"),
    # On several ranks.
    "collectives": lambda choice, bench: collectives.cases(bench.machine.platform, bench.machine.gpus or 1, small=bench.small),
    "ddp": lambda choice, bench: transformer.cases(small=bench.small, ranks=bench.machine.gpus),
    "overlap": lambda choice, bench: collectives.overlap_cases(bench.machine.gpus or 1, small=bench.small),
}


def records(kind: str, choice: Choice, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Measure one probe; of matrix products, search the fastest first, since other results are compared with it."""
    if kind == "gemm":
        for dtype in gemm.TRAINED_DTYPES:
            if dtype in choice.on(bench.machine.platform):
                yield from gemm.search(dtype, bench, log)
    yield from run(CASES[kind](choice, bench), bench, log)
