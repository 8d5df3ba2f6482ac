"""Plan several models or accelerators at once: what fits on some GPUs, and which GPUs to rent for a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tprimat.errors import ConfigError
from tprimat.facts.accelerators import Accelerator, accelerators, find_accelerator
from tprimat.facts.flops import parameters
from tprimat.facts.models import ModelShape, model_shape, models
from tprimat.report.plan_choices import Choice
from tprimat.runner.planning import USUAL_GPUS, PlanRequest, accelerator_of, answer, enough_gpus

ALL = "all"
SHORTEST_CONTEXT = 2048
"""Tokens; all models leaves out those with less, which the suite trains."""


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
        progress: gets a line before each answer.

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
    for number, (shape, accelerator, gpus) in enumerate(asked, 1):
        progress(f"{number} of {len(asked)}: {shape.name} on {gpus} x {accelerator.name}")
        found.append(_choice(request, shape, accelerator, gpus))
    return found


def _choice(request: PlanRequest, shape: ModelShape, accelerator: Accelerator, gpus: int) -> Choice:
    one = replace(request, architecture=shape, accelerator=accelerator.name, gpus=gpus)
    choice = Choice(shape=shape, accelerator=accelerator.name, gpus=gpus)
    try:
        answered, rates = answer(one)
    except ConfigError as error:
        return replace(choice, refused=error.what)
    enough = None if answered.fitting else enough_gpus(answered.question, rates, any_engine=request.engine is None)
    return replace(choice, found=(answered, rates), enough=enough)
