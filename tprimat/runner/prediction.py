"""Predict a plan before it runs, from the engine's use of memory and the machine's rates; and name what would fit instead."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tprimat.core import units
from tprimat.core.accelerators import Accelerator, find_accelerator
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.core.workload import FullWorkload
from tprimat.engines import FALLBACK
from tprimat.engines.base import engine_named, implementation_of
from tprimat.plan.build import with_options
from tprimat.plan.schema import RunPlan
from tprimat.predict.memory import Part, predict_memory
from tprimat.predict.rates import published_rates
from tprimat.predict.search import NARROWER, Candidate
from tprimat.predict.time import predict_time
from tprimat.records.schema import Machine, ProbeRecord, RunPrediction
from tprimat.report.plan import layout_name
from tprimat.runner.planning import candidates_for, enough_gpus, question_of, rates_of

ERROR_OF_MEMORY = 0.05
"""A run is refused only where it would not fit if the prediction were too high by this much; docs/planning.md has the errors."""
ERROR_OF_EMBEDDED = 0.02
"""The same for the embedded engine: 1.2 % too high at most, with fully_shard (docs/planning.md)."""
OF_ROUTED_TOKENS: tuple[Part, ...] = ("activations", "backward")
"""Parts that are smaller than predicted where full experts drop tokens."""
MOST_ALTERNATIVES = 3
MOST_DOUBLINGS = 7
EXPANDABLE = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""torch's allocator then grows its pieces instead of keeping fragments: the first remedy in its documentation."""


def planned_workload(plan: RunPlan) -> FullWorkload | None:
    """Return the workload of a plan on a GPU; None where the engine's use of memory, or the micro-batch, is not known."""
    code = implementation_of(plan)
    known = code is not None and plan.workload.micro_batch_sequences is not None
    return replace(plan.workload, implementation=code) if known else None


def predicted(plan: RunPlan, machine: Machine, probes: Sequence[ProbeRecord]) -> RunPlan:
    """Return the plan with its prediction: none on a CPU, and none before the micro-batch is found."""
    workload = None if plan.platform == "cpu" else planned_workload(plan)
    if workload is None:
        return replace(plan, prediction=None)
    memory = predict_memory(workload)
    prediction = RunPrediction(
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.reserved_bytes,
        memory={part: size for part, size in memory.parts.items() if size},
        stage=memory.stage,
        moment=memory.moment,
    )
    accelerator = find_accelerator(machine.accelerator)
    if accelerator is not None and workload.matmul_dtype in accelerator.dense_flops:
        rates = rates_of(accelerator, plan.gpus_per_node, probes)
        time = predict_time(workload, rates)
        parts: dict[str, float] = {part: seconds for part, seconds in time.parts.items() if seconds}
        prediction = replace(prediction, step_seconds=time.step_seconds, time=parts, rates=rates.source)
    return replace(plan, prediction=prediction)


def refuse_too_large(plan: RunPlan, machine: Machine) -> None:
    """Refuse a plan that cannot fit even if its prediction is too high by the usual error.

    Under an expert capacity only what does not depend on routing counts: how many tokens are dropped shows in the run.
    """
    need, room = plan.prediction, machine.memory_bytes
    if need is None or room is None or not _exceeds(plan, need.allocated_bytes, room):
        return
    if plan.workload.expert_capacity_factor is not None and not _exceeds(plan, _without_routed_tokens(need), room):
        return
    largest = max(need.memory, key=lambda part: need.memory[part])
    accelerator = find_accelerator(machine.accelerator)
    fits = alternatives(plan, accelerator)
    ways = [f"what fits: {', '.join(fits)}"] if fits else elsewhere(plan, accelerator)
    raise LaunchError(
        f"{plan.model} under {plan.strategy} needs {units.gibibytes(need.allocated_bytes)} on the fullest rank, by prediction.",
        where="--parallel",
        why=f"A GPU has {units.gibibytes(room)}. The largest part is {largest}: {units.gibibytes(need.memory[largest])}.",
        fix="; ".join([*ways, "--force runs it anyway"]),
    )


def doubtful_memory(plan: RunPlan, machine: Machine) -> str | None:
    """Say that a plan fits only if its expert capacity drops enough tokens; None where it does not depend on that."""
    need, room = plan.prediction, machine.memory_bytes
    if (
        need is None
        or room is None
        or plan.workload.expert_capacity_factor is None
        or not _exceeds(plan, need.allocated_bytes, room)
    ):
        return None
    return (
        f"{plan.model} under {plan.strategy} needs {units.gibibytes(need.allocated_bytes)} by prediction if no token is dropped, "
        f"and a GPU has {units.gibibytes(room)}. The expert capacity may drop enough."
    )


def _exceeds(plan: RunPlan, size: int, room: int) -> bool:
    return size > room * (1 + (ERROR_OF_EMBEDDED if plan.engine == FALLBACK else ERROR_OF_MEMORY))


def _without_routed_tokens(need: RunPrediction) -> int:
    return sum(size for part, size in need.memory.items() if part not in OF_ROUTED_TOKENS)


def alternatives(plan: RunPlan, accelerator: Accelerator | None) -> list[str]:
    """Return flags of what fits by prediction: the plan's own layout with less at once, then the fastest other layouts."""
    if accelerator is None or plan.platform == "cpu":
        return []
    layout, found = plan.workload.layout, candidates_for(plan, accelerator)
    own = (layout.tensor, layout.pipeline, layout.context, layout.expert)
    same = [_words(candidate, plan) for candidate in found if candidate.degrees == own and _differs(candidate, plan)]
    flag, by_sharding = _with_option(plan, accelerator, "fully_shard", value=True)
    sharded = [_words(candidate, plan, flag) for candidate in by_sharding if candidate.workload.layout == layout]
    others = {candidate.degrees: candidate for candidate in reversed(found) if candidate.degrees != own}
    fastest = sorted(others.values(), key=lambda candidate: candidate.time.step_seconds if candidate.time else 0.0)
    several = layout.data * layout.context > 1  # replicas that could share the weights
    return [*same[:1], *sharded[:several], *(_words(candidate, plan) for candidate in fastest)][:MOST_ALTERNATIVES]


def _with_option(plan: RunPlan, accelerator: Accelerator, name: str, *, value: Any) -> tuple[str, tuple[Candidate, ...]]:
    """Return the flag of an option of the engine, and what fits with it: nothing where it is set already, or refused."""
    options = replace(plan.engine_options, **{name: value})
    changed = replace(plan, engine_options=options, workload=with_options(plan.workload, options))
    refused = options == plan.engine_options or engine_named(plan.engine).refusal(changed, lambda *keys: ".".join(keys))
    flag = f"--set platform_optimizations.{plan.platform}.engine_options.{name}={str(value).lower()}"
    return flag, () if refused else candidates_for(changed, accelerator)


def elsewhere(plan: RunPlan, accelerator: Accelerator | None) -> list[str]:
    """Return what fits where no layout of the plan's engine does: with less in fp32, the embedded engine here, more GPUs."""
    if accelerator is None:
        return []
    fits = alternatives(replace(plan, engine=FALLBACK), accelerator) if plan.engine != FALLBACK else []
    other = [f"--engine {FALLBACK}, which fits: {', '.join(fits)}"] if fits else []
    return [*_narrower(plan, accelerator), *other, *_more_gpus(plan, accelerator)]


def _narrower(plan: RunPlan, accelerator: Accelerator) -> list[str]:
    """Return flags that fit with gradients, or else all states, in bf16: for the plan's own layout, or the fastest."""
    for name, cost in NARROWER.items():
        flag, found = _with_option(plan, accelerator, name, value="bf16")
        own = [candidate for candidate in found if candidate.workload.layout == plan.workload.layout]
        if found:
            return [f"{_words((own or found)[0], plan, flag)}, {cost}"]
    return []


def _more_gpus(plan: RunPlan, accelerator: Accelerator) -> list[str]:
    """Say how many GPUs, of the numbers that double the plan's, are the fewest that the model fits; nothing if no number does."""
    here = plan.nodes * plan.gpus_per_node
    if plan.platform == "cpu":
        return []
    try:
        question = question_of(plan, accelerator)
    except ConfigError:  # not an engine that is predicted
        return []
    counts = [here * 2**power for power in range(1, MOST_DOUBLINGS + 1)]
    enough = enough_gpus(question, published_rates(accelerator, question.gpus_per_node), counts, any_engine=False)
    return [f"{enough.workload.world_size} GPUs, the fewest that this model fits by prediction"] if enough else []


def _recomputes_otherwise(candidate: Candidate, plan: RunPlan) -> bool:
    work = candidate.workload
    return (work.recompute, work.recompute_layers) != (plan.workload.recompute, plan.workload.recompute_layers)


def _differs(candidate: Candidate, plan: RunPlan) -> bool:
    work = candidate.workload
    return work.micro_batch != plan.workload.micro_batch_sequences or _recomputes_otherwise(candidate, plan)


def _words(candidate: Candidate, plan: RunPlan, *flags: str) -> str:
    work = candidate.workload
    words = [*flags]
    if work.micro_batch != plan.workload.micro_batch_sequences:
        words.append(f"--micro-batch-size {work.micro_batch}")
    if _recomputes_otherwise(candidate, plan):
        words.append(f"recompute {work.recompute_words}")
    same = work.layout == plan.workload.layout
    named = "" if same else f"{layout_name(work)}{' ' if words else ''}"
    return f"{named}{' '.join(words)} ({units.gibibytes(candidate.memory.device_bytes)})"


def out_of_memory_hint(plan: RunPlan, machine: Machine, otherwise: str | None) -> str | None:
    """Return what to try after a run out of memory: fragments first, then what fits by prediction."""
    if plan.platform == "cpu":
        return otherwise
    name, value = EXPANDABLE
    accelerator = find_accelerator(machine.accelerator)
    fits = alternatives(plan, accelerator)
    if not fits and (ways := elsewhere(plan, accelerator)):
        return "; or ".join(ways)
    # The containers that Primus starts are given the plan's environment, and no variable of torch that is merely exported.
    way = "--set platform_optimizations.amd.environment." if plan.platform == "amd" else "export "
    first = [] if value in plan.environment.get(name, "") else [f"{way}{name}={value}"]
    rest = [f"what fits by prediction: {', '.join(fits)}"] if fits else [otherwise] if otherwise else []
    return "; then ".join([*first, *rest]) or None
