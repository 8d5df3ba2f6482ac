"""Answer which layout is fastest and fits: from what a user asks to a question, the machine's rates, and all candidates."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from tprimat.config.load import presets_of, read_config
from tprimat.config.schema import Precision
from tprimat.core.accelerators import (
    PLATFORM_OF,
    WITH_OWN_FP8,
    Accelerator,
    find_accelerator,
    multiplies,
    resembling,
)
from tprimat.core.errors import ConfigError, LaunchError, UserError
from tprimat.core.implementations import DISPATCHERS, EMBEDDED, MEGATRON_FSDP, MEGATRON_GRAPHED, MEGATRON_TUNED, Implementation
from tprimat.core.models import ModelShape, model_shape
from tprimat.core.workload import FORMATS, FullWorkload, Routing
from tprimat.engines import megatron, megatron_lm, primus
from tprimat.engines.base import engine_named, implementation_of
from tprimat.hardware.nodes import this_machine
from tprimat.plan.build import shape_at
from tprimat.plan.graphs import launches_graphs
from tprimat.plan.schema import RunPlan, plan_of
from tprimat.predict.rates import Rates, probed_rates, published_rates
from tprimat.predict.search import Answer, Candidate, LayoutQuestion, search, smallest_that_fits, workloads
from tprimat.records.discover import probes_in
from tprimat.records.schema import Machine, ProbeRecord

USUAL_GPUS, USUAL_SEQUENCE_TOKENS = 8, 8192
POWERS_OF_TWO = tuple(2**power for power in range(11))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutsAsked:
    """The layouts that a user asks for. None: this machine, or the usual."""

    shape: ModelShape
    accelerator: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    global_batch: int | None = None
    sequence_tokens: int | None = None
    precision: str = "bf16"
    routing: Routing = "natural"
    dispatcher: str | None = None
    """A key of DISPATCHERS; None: as the engine has it."""
    capacity: float | None = None
    """What an expert takes, times the mean of all; None: it drops nothing."""
    engine: str | None = None
    probes: tuple[Path, ...] = ()


def model_asked(name: str) -> tuple[ModelShape, int | None, int | None]:
    """Return the shape of a model of config.yaml, with the global batch and the sequence length there, or of the table."""
    loaded = read_config()
    if name not in loaded.config.models:
        return model_shape(name), None, None
    data = loaded.config.training.data
    return shape_at(loaded, name, "full"), data.global_batch_size, data.sequence_length


def price_per_hour(accelerator: str | None) -> float | None:
    """Return what config.yaml's cloud_costs say a GPU costs; None where they say nothing of it."""
    here = accelerator_of(accelerator)[0]
    costs = read_config().config.benchmarking.cloud_costs
    return next((price for name, price in costs.items() if find_accelerator(name) is here), None)


def answer(asked: LayoutsAsked) -> tuple[Answer, Rates]:
    """Predict every legal layout of a model of the table.

    Where no engine is named, the embedded one is asked, whose stages are equal; Megatron-LM for what it cannot start or fit, and
    for mixtures whose layers no pipeline divides, such as DeepSeek-V3's 61; and Primus where fp8 needs it.
    """
    accelerator, shape = accelerator_of(asked.accelerator)[0], asked.shape
    if asked.engine is not None:
        return _answer_by(asked.engine, asked)
    tuned = FORMATS[asked.precision][1] is not None or DISPATCHERS.get(asked.dispatcher or "", False)
    if tuned or shape.not_trained or (shape.experts is not None and all(shape.layers % stages for stages in (2, 3, 4))):
        return _answer_by(megatron_lm.ENGINE.name, asked)
    if asked.precision == "fp8" and accelerator.name in WITH_OWN_FP8:
        return _answer_by(primus.ENGINE.name, asked)
    own = _answer_by(megatron.ENGINE.name, asked)
    if own[0].fitting and own[0].question.unstarted is None:
        return own
    other = _answer_by(megatron_lm.ENGINE.name, asked)
    return other if other[0].fitting else own


def _answer_by(engine: str, asked: LayoutsAsked) -> tuple[Answer, Rates]:
    """Predict what an engine starts; Megatron-LM, what its engine cannot start or fit, as NVIDIA tunes it."""
    shape, (accelerator, here) = asked.shape, accelerator_of(asked.accelerator)
    gpus, per_node = _gpus(asked, here, accelerator.node_gpus)
    work = FullWorkload(
        shape=shape,
        global_batch_sequences=asked.global_batch or _usual_batch(gpus),
        sequence_tokens=asked.sequence_tokens or min(USUAL_SEQUENCE_TOKENS, shape.context_tokens),
        matmul_dtype=FORMATS[asked.precision][0],
        fp8_scaling=FORMATS[asked.precision][1],
        routing=asked.routing if shape.experts else None,
        expert_capacity=asked.capacity if shape.experts else None,
    )
    own, config = engine_named(engine), read_config().config
    ranks = {"platform": PLATFORM_OF[accelerator.backend], "gpus_per_node": per_node, "nodes": gpus // per_node}
    names = {"engine": engine, "trainer": own.trainer, **presets_of(config, shape.name)}
    plan = plan_of(work, seed=config.experiment.seed, **names, **ranks)
    question = question_of(plan, accelerator, asked.accelerator)
    if own is not megatron_lm.ENGINE:
        return _started(_answer(_dispatched(question, asked.dispatcher), accelerator, asked.probes), plan)
    tuned = by_megatron_lm(question, accelerator)
    if not DISPATCHERS.get(asked.dispatcher or "", False) and _obstacle(plan) is None:
        result = _answer(question, accelerator, asked.probes)
        if result[0].fitting:
            return result
    return _started(_answer(_dispatched(tuned, asked.dispatcher), accelerator, asked.probes), plan)


def _started(rated: tuple[Answer, Rates], plan: RunPlan) -> tuple[Answer, Rates]:
    answer, rates = rated
    if not answer.fitting:
        return rated
    why = _obstacle(replace(plan, workload=answer.fitting[0].workload))
    if answer.question.engine is None and why is None:
        what = f"The engine {plan.engine} sets neither NVIDIA's tuning nor FSDP nor stages of unequal length."
        why = LaunchError(what, fix="give the degrees to the framework's own flags")
    return replace(answer, question=replace(answer.question, unstarted=why)), rates


def _obstacle(plan: RunPlan) -> UserError | None:
    shape, precision = plan.workload.shape, plan.workload.format
    if shape.not_trained is not None or precision not in get_args(Precision):
        return LaunchError(f"No engine here trains {shape.not_trained or f'in {precision}'}.")
    return engine_named(plan.engine).refusal(plan, lambda *keys: ".".join(keys))


def _dispatched(question: LayoutQuestion, dispatcher: str | None) -> LayoutQuestion:
    if dispatcher is None:
        return question
    once, code, sharded = DISPATCHERS[dispatcher], question.work.code, question.sharded
    if once and not code.dispatches_once_a_node:
        what = f"The engine {question.engine} sends tokens to experts by alltoall."
        raise ConfigError(what, where="--routing", fix="--engine megatron-lm, or --routing alltoall")
    work = replace(question.work, implementation=replace(code, dispatches_once_a_node=once))
    return replace(question, work=work, sharded=sharded and replace(sharded, dispatches_once_a_node=once))


def by_megatron_lm(question: LayoutQuestion, accelerator: Accelerator) -> LayoutQuestion:
    """Return the same question to Megatron-LM as NVIDIA tunes it, with unequal stages or FSDP: its engine does not start that."""
    code = MEGATRON_GRAPHED if accelerator.vendor == "NVIDIA" else MEGATRON_TUNED
    work = replace(question.work, implementation=code)
    return replace(question, work=work, engine=None, equal_stages=False, refusal=None, as_run=None, sharded=MEGATRON_FSDP)


def enough_gpus(question: LayoutQuestion, rates: Rates, *, any_engine: bool) -> Candidate | None:
    """Return a layout that fits on the fewest GPUs, of the powers of two above the question's number; None where none does.

    Its batch is that of the question. With any engine, Megatron-LM's layouts count as well.
    """
    kinds, accelerator = [question], accelerator_of(rates.accelerator)[0]
    if any_engine and question.equal_stages:
        kinds.append(by_megatron_lm(question, accelerator))
    for gpus in (count for count in POWERS_OF_TWO if count > question.gpus):
        per_node = max(question.gpus_per_node, min(gpus, accelerator.node_gpus))
        for kind in kinds:
            if candidate := smallest_that_fits(replace(kind, gpus=gpus, gpus_per_node=per_node), rates):
                return candidate
    return None


def answer_for(plan: RunPlan, accelerator_name: str | None, probes: Sequence[Path]) -> tuple[Answer, Rates]:
    """Predict every legal layout for the model, batch, precision and engine of a plan, whatever its own layout is."""
    accelerator, _ = accelerator_of(accelerator_name)
    return _answer(question_of(plan, accelerator, accelerator_name), accelerator, probes)


def question_of(plan: RunPlan, accelerator: Accelerator, named: str | None = None) -> LayoutQuestion:
    """Return the layouts that a plan could have instead; where an accelerator is `named`, on a machine that may be elsewhere."""
    machine = this_machine()
    elsewhere = named is not None and (machine is None or find_accelerator(machine.accelerator) is not accelerator)
    # Elsewhere a plan may count on Transformer Engine, as NeMo's container has it; None: look here.
    code = implementation_of(plan, True if elsewhere else None)
    if code is None or plan.workload.matmul_dtype == "fp32":
        what = f"The engine {plan.engine} in {plan.workload.matmul_dtype} cannot be predicted."
        raise ConfigError(what, where="--engine", fix="--engine megatron --precision bf16")

    def as_run(question: LayoutQuestion, work: FullWorkload) -> Implementation:
        return replace(code, launches_own_layers=not launches_graphs(_with(plan, question, work)))

    refusal = engine_named(plan.engine).refusal_of_layout
    return LayoutQuestion(
        work=replace(plan.workload, implementation=code, recompute_modules=None, recompute_layers=None),
        gpus=plan.nodes * plan.gpus_per_node,
        gpus_per_node=plan.gpus_per_node,
        memory_bytes=accelerator.usable_bytes,
        engine=plan.engine,
        equal_stages=True,
        refusal=lambda question, work: refusal(_with(plan, question, work), lambda *keys: ".".join(keys), question.work.code),
        as_run=as_run if code.name == EMBEDDED.name else None,
    )


def _with(plan: RunPlan, question: LayoutQuestion, work: FullWorkload) -> RunPlan:
    """Return a plan with another layout, batch and number of GPUs."""
    return replace(
        plan,
        nodes=max(1, question.gpus // question.gpus_per_node),
        gpus_per_node=question.gpus_per_node,
        workload=work.changed(weights_split_over=work.replicas) if plan.engine_options.fully_shard else work,
    )


def _answer(question: LayoutQuestion, accelerator: Accelerator, probes: Sequence[Path]) -> tuple[Answer, Rates]:
    shape, tokens, batch = question.work.shape, question.work.sequence_tokens, question.work.global_batch_sequences
    if tokens > shape.context_tokens:
        what = f"A sequence of {tokens} tokens is out of range."
        raise ConfigError(what, where="--sequence-length", fix=f"1 to {shape.context_tokens:,} tokens")
    refuse_precision(accelerator, question.work.format, among=FORMATS)
    if question.work.matmul_dtype == "fp8" and accelerator.name in WITH_OWN_FP8 and question.work.code.name == EMBEDDED.name:
        what = f"The embedded engine cannot multiply in fp8 on {accelerator.name}."
        why = "Its matrix units take 8-bit types of their own (e4m3fnuz), which the engine does not use."
        raise ConfigError(what, where="--engine", why=why, fix="--engine primus, or --precision bf16")
    rates = rates_of(accelerator, question.gpus_per_node, probes_in(probes)[0])
    result = search(question, rates)
    if not result.fitting and not result.too_large:
        first = next(workloads(replace(question, refusal=None)), None)
        if first and question.refusal and (refused := question.refusal(question, first)):
            raise ConfigError(refused.what, where="--engine", why=refused.why, fix=refused.fix)
        why = f"No layout divides {batch} sequences of {tokens:,} tokens over {question.gpus} GPUs."
        fix = f"--global-batch-size {_usual_batch(question.gpus)}"
        raise ConfigError("There is no valid layout.", where="--gpus", why=why, fix=fix)
    return result, rates


def rates_of(accelerator: Accelerator, gpus_per_node: int, probes: Sequence[ProbeRecord]) -> Rates:
    """Return the rates of an accelerator: by the probes that ran on one, else as published."""
    own = [probe for probe in probes if find_accelerator(probe.machine.accelerator) is accelerator]
    return probed_rates(own, accelerator, gpus_per_node) if own else published_rates(accelerator, gpus_per_node)


def accelerator_of(name: str | None) -> tuple[Accelerator, int | None]:
    """Return the accelerator of a name that --gpu gives, or for None this machine's and how many of it are here."""
    if name is not None:
        accelerator = find_accelerator(name)
        if accelerator is None:
            near = [known.name for known in resembling(name)] or ["the nearest data sheet in python3 -m tprimat models"]
            what = f"There is no accelerator {name!r}."
            raise ConfigError(what, where="--gpu", why="Its data sheet is not in the table.", fix=", ".join(near))
        return accelerator, None
    machine = this_machine()
    accelerator = find_accelerator(machine.accelerator) if machine else None
    if accelerator is None:
        seen = f"It shows {machine.accelerator}, which is not in the table." if machine else "It shows no GPU."
        fix = '--gpu "H100 SXM" --gpus 8, or another of python3 -m tprimat models'
        raise ConfigError("The accelerator of this machine is not known.", where="--gpu", why=seen, fix=fix)
    return accelerator, machine.gpus_per_node if machine else None


def _gpus(request: LayoutsAsked, here: int | None, usual: int) -> tuple[int, int]:
    """Return the number of GPUs, and how many of them are in one node, which usually has so many."""
    gpus = request.gpus or ((here or usual) * request.nodes if request.nodes else here or USUAL_GPUS)
    nodes = request.nodes or max(1, -(-gpus // usual))
    if gpus % nodes:
        what, fix = f"{gpus} GPUs are not the same number on each of {nodes} nodes.", f"--gpus {max(1, gpus // nodes) * nodes}"
        raise ConfigError(what, where="--nodes", fix=fix)
    return gpus, gpus // nodes


def _usual_batch(gpus: int) -> int:
    """Return two sequences per GPU, at least 128, as a multiple of the GPUs."""
    return -(-max(128, 2 * gpus) // gpus) * gpus


def named_machine(name: str, precision: str | None) -> Machine:
    """Return the machine that --gpu describes: a node of the vendor's reference system."""
    accelerator, _ = accelerator_of(name)
    refuse_precision(accelerator, precision or "bf16", "--gpu")
    return Machine(
        platform=accelerator.backend,
        accelerator=accelerator.name,
        gpus_per_node=accelerator.node_gpus,
        nodes=1,
        memory_bytes=accelerator.usable_bytes,
    )


def refuse_precision(
    accelerator: Accelerator | None, wanted: str, where: str = "--precision", among: Iterable[str] = get_args(Precision)
) -> None:
    """Refuse what a known GPU does not multiply in, naming those of `among` in which it does."""
    if accelerator is not None and not multiplies(accelerator, wanted):
        known = [one for one in among if multiplies(accelerator, one)]
        fix = f"--precision {', '.join(known)}, or a later GPU"
        raise ConfigError(f"{accelerator.name} does not multiply in {wanted}.", where=where, fix=fix)
