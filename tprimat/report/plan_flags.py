"""The flags of ./benchmark.py that run what a plan predicts, on the machine that it is for."""

from collections.abc import Mapping

from tprimat.core.accelerators import PLATFORM_OF, find_accelerator
from tprimat.core.workload import FullWorkload
from tprimat.predict.rates import Rates
from tprimat.predict.search import Question

USUAL_GPUS = 8
"""Of a node: what ./benchmark.py assumes of a machine that is not here."""


def flags_of(workload: FullWorkload, question: Question, rates: Rates) -> str:
    """Return the flags that run a layout as it was predicted; without them it might not fit."""
    layout, machine = workload.layout, _of_machine(question, rates)
    again, layers = workload.recompute, workload.recompute_layers
    own = f"platform_optimizations.{machine['--platform']}.recompute"
    settings = {
        "vpp": layout.virtual_pipeline,
        "cp": layout.context if layout.context > 1 else None,
        "ep": layout.expert if layout.expert > 1 else None,
        own: None if again == "none" else again,
        f"{own}_layers": None if again == "none" else layers or None,
    }
    flags = {
        "--engine": question.engine,
        **machine,
        "--tp": layout.tensor,
        "--pp": layout.pipeline,
        "--micro-batch-size": workload.micro_batch,
        "--global-batch-size": workload.micro_batch * workload.accumulation * layout.data,
        "--sequence-length": workload.sequence_tokens,
        "--precision": workload.matmul_dtype,
    }
    set_to = (f"--set {name}={value}" for name, value in settings.items() if value is not None)
    return " ".join([_words(flags), *set_to])


def measuring_flags(question: Question, rates: Rates) -> str:
    """Return the flags that measure the best layouts and run the fastest."""
    flags = {
        "--engine": question.engine,
        **_of_machine(question, rates),
        "--parallel": "auto:3",
        "--global-batch-size": question.work.global_batch_sequences,
        "--sequence-length": question.work.sequence_tokens,
        "--precision": question.work.matmul_dtype,
    }
    return _words(flags)


def _of_machine(question: Question, rates: Rates) -> dict[str, str | int | None]:
    """Return the flags that name a plan's machine: without them ./benchmark.py takes the one it runs on."""
    accelerator = find_accelerator(rates.accelerator)
    in_node = min(question.gpus, question.gpus_per_node)
    return {
        "--platform": None if accelerator is None else PLATFORM_OF[accelerator.backend],
        "--nodes": question.gpus // in_node if question.gpus > in_node else None,
        "--gpus": in_node if in_node != USUAL_GPUS else None,
    }


def _words(flags: Mapping[str, object]) -> str:
    """Write flags as they are typed, without those that have no value."""
    return " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
