"""The record that a run starts with, and where the evidence contradicts the plan."""

from collections.abc import Iterator

from tprimat.core.workload import ATTENTION_ALONE, COMPARED, COMPARED_WITH_EXPERTS
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Evidence, Machine, RunRecord


def first_record(plan: RunPlan, machine: Machine, started_at: str) -> RunRecord:
    """Return the record of a run that has not reported anything yet. The launcher adds what the engine knows."""
    return RunRecord(
        run_id=plan.run_id,
        model=plan.model,
        size=plan.size,
        strategy=plan.strategy,
        engine=plan.engine,
        workload=plan.workload,
        seed=plan.seed,
        machine=machine,
        started_at=started_at,
        clock="step_end",
        outcome="running",
        command=plan.command,
        prediction=plan.prediction,
    )


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
    names = MUST_BE_READ - ({"matmul dtype"} if plan.workload.matmul_dtype == "fp32" else set())
    names |= {"virtual pipeline"} if plan.workload.virtual_pipeline not in {None, 1} else set()
    return tuple(
        f"{name}: {planned} was asked for, the log does not say what ran"
        for name, planned, ran in _pairs(plan, evidence)
        if ran is None and name in names
    )


def _pairs(plan: RunPlan, evidence: Evidence) -> Iterator[tuple[str, object, object]]:
    asked, seen = plan.workload, evidence.workload
    yield "world size", asked.world_size, evidence.world_size
    for field, name in {**COMPARED, **(COMPARED_WITH_EXPERTS if asked.shape.experts else {})}.items():
        if (planned := getattr(asked, field)) is not None:  # a micro-batch that the run has to find
            yield name, planned, getattr(seen, field)
    yield "virtual pipeline", asked.virtual_pipeline or 1, seen.virtual_pipeline
    yield "tokens a step", asked.tokens_per_step, evidence.tokens_per_step
    if asked.recompute == seen.recompute == "selective" and seen.recompute_modules is not None:
        yield "recomputed modules", ", ".join(asked.recompute_modules or ATTENTION_ALONE), ", ".join(seen.recompute_modules)
    if asked.recompute == seen.recompute == "full":
        yield "recomputed layers", asked.recompute_layers or "all", seen.recompute_layers or "all"
    if evidence.source == "running_framework":  # a log reports the parameters of one rank
        yield "parameters", asked.parameters, evidence.parameters
