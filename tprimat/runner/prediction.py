"""Predict a plan before it runs, from the engine's use of memory and the machine's rates; and name what would fit instead."""

from collections.abc import Sequence
from dataclasses import replace

from tprimat.core import units
from tprimat.core.accelerators import Accelerator, find_accelerator
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.core.workload import FullWorkload
from tprimat.engines.base import implementation_of
from tprimat.logs.failures import signatures
from tprimat.plan.schema import RunPlan
from tprimat.predict.calibration import expected
from tprimat.predict.memory import Fit, MemoryPrediction, Part, predict_memory
from tprimat.predict.search import Candidate, search
from tprimat.predict.time import predict_time
from tprimat.records.schema import Machine, ProbeRecord, RunPrediction
from tprimat.report.plan import layout_name
from tprimat.runner.planning import enough_gpus, question_of, rates_of

OF_ROUTED_TOKENS: tuple[Part, ...] = ("activations", "backward")
"""Parts that are smaller than predicted where full experts drop tokens."""
MOST_ALTERNATIVES = 3
EXPANDABLE = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""torch's allocator then grows its pieces instead of keeping fragments: the first remedy in its documentation."""


def planned_workload(plan: RunPlan) -> FullWorkload | None:
    """Return the workload of a plan on a GPU; None on a CPU, or where the engine's use of memory is not known."""
    code = None if plan.platform == "cpu" else implementation_of(plan)
    return None if code is None else replace(plan.workload, implementation=code)


def predicted(plan: RunPlan, machine: Machine, probes: Sequence[ProbeRecord]) -> RunPlan:
    """Return the plan with its prediction; none on a CPU."""
    workload = planned_workload(plan)
    if workload is None:
        return replace(plan, prediction=None)
    memory = predict_memory(workload)
    prediction = RunPrediction(
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.reserved_bytes,
        device_bytes=memory.device_bytes,
        memory={part: size for part, size in memory.parts.items() if size},
        stage=memory.stage,
        moment=memory.moment,
    )
    accelerator = find_accelerator(machine.accelerator)
    if accelerator is not None and workload.matmul_dtype in accelerator.dense_flops:
        rates = rates_of(accelerator, plan.gpus_per_node, probes)
        time = predict_time(workload, rates)
        usual = expected(workload, accelerator, plan.gpus_per_node, measured=rates.measured)
        step = usual.of(time.step_seconds, time.slow_host_seconds)
        share = step.step_seconds / time.step_seconds
        parts: dict[str, float] = {part: share * seconds for part, seconds in time.parts.items() if seconds}
        prediction = replace(
            prediction,
            step_seconds=step.step_seconds,
            step_seconds_low=step.low,
            step_seconds_high=step.high,
            time=parts,
            rates=rates.source,
        )
    return replace(plan, prediction=prediction)


def gate(plan: RunPlan, machine: Machine | None) -> tuple[Fit, MemoryPrediction] | None:
    """Return whether a plan runs in the memory of a machine's GPUs, and what it needs; None where either is not known.

    Under a capacity, how many tokens experts drop shows only in the run: what they receive does not count against it.
    """
    workload, room = planned_workload(plan), machine.memory_bytes if machine else None
    if workload is None or room is None:
        return None
    need = predict_memory(workload)
    if plan.workload.expert_capacity_factor is not None:
        sure = replace(need, parts={part: 0 if part in OF_ROUTED_TOKENS else size for part, size in need.parts.items()})
        return sure.fit(room), need
    return need.fit(room), need


def need_words(need: MemoryPrediction) -> str:
    """Say what a plan is expected to need, and at most."""
    expected_bytes, most = units.gibibytes(need.expected_device_bytes), units.gibibytes(need.device_bytes)
    return f"{expected_bytes} predicted on the fullest rank, at most {most}"


def memory_words(fit: Fit, need: MemoryPrediction, room: int | None) -> str:
    """Say what a plan needs, beside what a GPU has."""
    words = f"{need_words(need)}; a GPU has {units.gibibytes(room)}"
    return words if fit == "fits" else f"{words}: {fit}"


def refuse_too_large(plan: RunPlan, machine: Machine) -> str | None:
    """Refuse a plan that cannot fit even if its prediction is too high by the usual error; return a warning where it may not."""
    room = machine.memory_bytes
    gated = gate(plan, machine)
    if gated is None or gated[0] == "fits":
        return None
    fit, need = gated
    largest = max(need.parts, key=lambda part: need.parts[part])
    ways = ways_out(plan, find_accelerator(machine.accelerator))
    if fit == "too tight to promise":
        return f"memory: {memory_words(fit, need, room)}. {ways or ''}".rstrip()
    raise LaunchError(
        f"{plan.model} under {plan.strategy} is predicted to need {units.gibibytes(need.allocated_bytes)} on the fullest rank.",
        where="--parallel",
        why=f"A GPU has {units.gibibytes(room)}. The largest part is {largest}: {units.gibibytes(need.parts[largest])}.",
        fix="; ".join(filter(None, [ways, "--force runs it anyway"])),
    )


def ways_out(plan: RunPlan, accelerator: Accelerator | None) -> str | None:
    """Return what fits by prediction: the plan's own layout with less at once, the fastest others, or how many GPUs would do."""
    if accelerator is None or plan.platform == "cpu":
        return None
    try:
        question = question_of(plan, accelerator)
    except ConfigError:  # not an engine that is predicted
        return None
    rates = rates_of(accelerator, plan.gpus_per_node, ())
    fitting = search(question, rates).fitting
    layout = plan.workload.layout
    own = (layout.tensor, layout.pipeline, layout.context, layout.expert, int(question.work.code.shards_weights))
    same = [candidate for candidate in fitting if candidate.degrees == own and _changes(candidate, plan)]
    others = {candidate.degrees: candidate for candidate in reversed(fitting) if candidate.degrees != own}
    fastest = sorted(others.values(), key=lambda candidate: candidate.step_seconds)
    if fits := [
        f"{_changes(candidate, plan)} (at most {units.gibibytes(candidate.memory.device_bytes)})"
        for candidate in (*same[:1], *fastest)
    ]:
        return f"what fits by prediction: {', '.join(fits[:MOST_ALTERNATIVES])}"
    enough = enough_gpus(question, rates, any_engine=False)
    return f"{enough.workload.world_size} GPUs, the fewest that this model fits by prediction" if enough else None


def _changes(candidate: Candidate, plan: RunPlan) -> str:
    work, own = candidate.workload, plan.workload
    words = [] if work.layout == own.layout else [layout_name(work)]
    if work.micro_batch != own.micro_batch_sequences:
        words.append(f"--micro-batch-size {work.micro_batch}")
    if (work.recompute, work.recompute_layers) != (own.recompute, own.recompute_layers):
        words.append(f"recompute {work.recompute_words}")
    return " ".join(words)


def out_of_memory_hint(plan: RunPlan, machine: Machine, otherwise: str | None) -> str | None:
    """Return what to try after a run out of memory: fragments first, then what fits by prediction."""
    own = next(one.hint for one in signatures("causes") if one.name == "out_of_memory") or ""
    if plan.platform == "cpu" or not (otherwise or own).startswith(own):  # another process's memory, or the host's
        return otherwise
    name, value = EXPANDABLE
    # The containers that Primus starts are given the plan's environment, and no variable of torch that is merely exported.
    way = "--set platform_optimizations.amd.environment." if plan.platform == "amd" else "export "
    first = None if value in plan.environment.get(name, "") else f"{way}{name}={value}"
    return "; then ".join(filter(None, [first, ways_out(plan, find_accelerator(machine.accelerator)) or otherwise])) or None
