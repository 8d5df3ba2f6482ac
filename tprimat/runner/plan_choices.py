"""Plan several models or accelerators at once: what fits on some GPUs, and which GPUs to rent for a model."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from typing import TypeAlias

from tprimat.core.accelerators import Accelerator, accelerators, find_accelerator
from tprimat.core.errors import ConfigError
from tprimat.core.flops import parameters
from tprimat.core.models import ModelShape, model_shape, models
from tprimat.hardware.nodes import cpu_cores
from tprimat.predict.search import Answer
from tprimat.report.plan_choices import Choice
from tprimat.runner.planning import USUAL_GPUS, PlanRequest, accelerator_of, answer, enough_gpus, narrower

ALL = "all"
SHORTEST_CONTEXT = 2048
"""Tokens; all models leaves out those with less, which the suite trains."""
FEWEST_OF_A_PROCESS = 4
"""Answers that are worth the start of another process."""
Asked: TypeAlias = tuple[ModelShape, Accelerator, int]
"""A model on so many GPUs of one kind."""


def shapes_of(names: str) -> list[ModelShape]:
    """Return the models of names with commas between them; all: each of the table, smallest first.

    Raises:
        ConfigError: the table has no such model.
    """
    if names == ALL:
        long_enough = (shape for shape in models().values() if shape.context_tokens >= SHORTEST_CONTEXT)
        return sorted(long_enough, key=lambda shape: parameters(shape).total)
    return [model_shape(name.strip()) for name in names.split(",") if name.strip()]


def accelerators_of(names: str | None) -> list[str | None]:
    """Return the accelerators of names with commas between them; None alone is this machine's, all each of the table.

    Raises:
        ConfigError: the table has no such accelerator.
    """
    if names is None or find_accelerator(names):
        return [names]
    if names == ALL:
        return [accelerator.name for accelerator in accelerators()]
    return [accelerator_of(name.strip())[0].name for name in names.split(",") if name.strip()]


def plan_choices(
    request: PlanRequest,
    shapes: Sequence[str | ModelShape],
    names: Sequence[str | None],
    counts: Sequence[int],
    progress: Callable[[str], None],
) -> list[Choice]:
    """Answer a request for each model on each accelerator, with each number of GPUs (none: as for one).

    If one of them cannot be asked, as for a dtype that its accelerator lacks, its choice says why.

    Args:
        request: what all have in common.
        shapes: models.
        names: accelerators; None is this machine's.
        counts: numbers of GPUs.
        progress: gets a line after each answer.

    Raises:
        ConfigError: this machine's accelerator is not known.
    """
    known = [accelerator_of(name) for name in names]
    asked = [
        (shape if isinstance(shape, ModelShape) else model_shape(shape), accelerator, gpus)
        for shape in shapes
        for accelerator, here in known
        for gpus in (counts or [here or USUAL_GPUS])
    ]
    found = []
    for number, choice in enumerate(_choices(request, asked), 1):
        progress(f"{number} of {len(asked)}: {choice.shape.name} on {choice.gpus} x {choice.accelerator}")
        found.append(choice)
    return found


def _choices(request: PlanRequest, asked: Sequence[Asked]) -> Iterator[Choice]:
    """Yield an answer for each, in order; many are computed by several processes."""
    processes = min(cpu_cores(), len(asked) // FEWEST_OF_A_PROCESS)
    if processes < 2:
        yield from (_choice(request, one) for one in asked)
        return
    pool = ProcessPoolExecutor(processes, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield from pool.map(_choice, repeat(request), asked)
    finally:
        pool.shutdown(cancel_futures=True)


def _choice(request: PlanRequest, asked: Asked) -> Choice:
    shape, accelerator, gpus = asked
    one = replace(request, architecture=shape, accelerator=accelerator.name, gpus=gpus)
    choice = Choice(shape=shape, accelerator=accelerator.name, gpus=gpus)
    try:
        answered, rates = answer(one)
    except ConfigError as error:
        return replace(choice, refused=error.what)
    enough = None if answered.fitting else enough_gpus(answered.question, rates, any_engine=request.engine is None)
    less = None if answered.fitting else narrower(answered.question, rates)
    return replace(choice, found=(_reduced(answered), rates), enough=enough, narrower=less and less[0])


def _reduced(answered: Answer) -> Answer:
    """Return one variant of each layout, so that many answers fit the memory, in a form that another process can send."""
    asked = replace(answered.question, refusal=None)
    return replace(answered, question=asked, fitting=tuple(answered.layouts()), too_large=tuple(answered.nearly()))
