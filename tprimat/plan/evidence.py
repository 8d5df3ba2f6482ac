"""The record that a run starts with, and where the evidence contradicts the plan."""

from collections.abc import Iterator
from dataclasses import replace

from tprimat.core.flops import parameters
from tprimat.core.models import padded_vocabulary
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Evidence, ExpertCapacity, Machine, RunRecord


def first_record(plan: RunPlan, machine: Machine, started_at: str) -> RunRecord:
    """Return the record of a run that has not reported anything yet. The launcher adds what the engine knows."""
    layout, batch = plan.layout, plan.batch
    micro = batch.micro_batch_sequences
    return RunRecord(
        run_id=plan.run_id,
        model=plan.model,
        size=plan.size,
        shape=plan.shape,
        strategy=plan.strategy,
        engine=plan.engine,
        matmul_dtype=plan.precision,
        recompute=plan.recompute,
        recompute_modules=plan.recompute_modules,
        recompute_layers=plan.recompute_layers,
        tensor_parallel=layout.tensor,
        pipeline_parallel=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        context_parallel=layout.context,
        expert_parallel=layout.expert,
        data_parallel=layout.data,
        routing=plan.routing,
        expert_capacity=planned_capacity(plan),
        micro_batch_sequences=None if isinstance(micro, str) else micro,
        micro_batch_search=plan.micro_batch_search,
        global_batch_sequences=batch.global_batch_sequences,
        sequence_tokens=batch.sequence_tokens,
        seed=plan.seed,
        machine=machine,
        software={},
        started_at=started_at,
        clock="step_end",
        outcome="running",
        command=plan.command,
        prediction=plan.prediction,
    )


def planned_capacity(plan: RunPlan) -> ExpertCapacity | None:
    """Return how much an expert takes; None for a model without experts."""
    return (plan.moe_expert_capacity_factor or "unlimited") if plan.shape.experts else None


def mismatches(plan: RunPlan, evidence: Evidence) -> tuple[str, ...]:
    """List what the framework ran other than planned, so that the run does not count. An absent fact is not a mismatch."""
    return tuple(
        f"{name}: {planned} was asked for, {ran} ran"
        for name, planned, ran in _pairs(plan, evidence)
        if ran is not None and planned != ran
    )


MUST_BE_READ = {"tensor parallel", "pipeline parallel", "micro batch", "global batch", "sequence length", "matmul dtype"}


def unproven(plan: RunPlan, evidence: Evidence) -> tuple[str, ...]:
    """List what the log of a framework that takes its settings from a command line must report for its run to count, and did not.

    Megatron prints no dtype for fp32, and no virtual pipeline where there is none.
    """
    names = MUST_BE_READ - ({"matmul dtype"} if plan.precision == "fp32" else set())
    names |= {"virtual pipeline"} if plan.layout.virtual_pipeline not in {None, 1} else set()
    return tuple(
        f"{name}: {planned} was asked for, the log does not say what ran"
        for name, planned, ran in _pairs(plan, evidence)
        if ran is None and name in names
    )


def _pairs(plan: RunPlan, evidence: Evidence) -> Iterator[tuple[str, object, object]]:
    layout, batch = plan.layout, plan.batch
    yield "world size", layout.world_size, evidence.world_size
    yield "tensor parallel", layout.tensor, evidence.tensor_parallel
    yield "pipeline parallel", layout.pipeline, evidence.pipeline_parallel
    yield "virtual pipeline", layout.virtual_pipeline or 1, evidence.virtual_pipeline
    yield "context parallel", layout.context, evidence.context_parallel
    yield "data parallel", layout.data, evidence.data_parallel
    if plan.shape.experts:
        yield "expert parallel", layout.expert, evidence.expert_parallel
        yield "routing", plan.routing or "natural", evidence.routing
        yield "expert capacity", planned_capacity(plan), evidence.expert_capacity
    replicas = layout.data * layout.context
    yield "replicas that share weights", replicas if plan.engine_options.fully_shard else 1, evidence.weights_split_over
    yield "sequence parallel", layout.sequence_parallel, evidence.sequence_parallel
    if not isinstance(batch.micro_batch_sequences, str):
        yield "micro batch", batch.micro_batch_sequences, evidence.micro_batch_sequences
    yield "global batch", batch.global_batch_sequences, evidence.global_batch_sequences
    yield "sequence length", batch.sequence_tokens, evidence.sequence_tokens
    yield "tokens a step", batch.tokens_per_step, evidence.tokens_per_step
    yield "matmul dtype", plan.precision, evidence.matmul_dtype
    yield "recompute", plan.recompute, evidence.recompute
    if plan.recompute_modules and plan.recompute == evidence.recompute and evidence.recompute_modules is not None:
        yield "recomputed modules", ", ".join(plan.recompute_modules), ", ".join(evidence.recompute_modules)
    if plan.recompute == evidence.recompute == "full":
        yield "recomputed layers", plan.recompute_layers or "all", evidence.recompute_layers or "all"
    if evidence.source == "running_framework":  # a log reports the parameters of one rank
        trained = replace(plan.shape, vocabulary=padded_vocabulary(plan.shape))
        yield "parameters", parameters(trained).total, evidence.parameters
