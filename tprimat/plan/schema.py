"""The plan of a run: the document that goes into a worker (plan.json), and where evidence contradicts it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from tprimat.config.options import removed
from tprimat.config.schema import (
    BenchmarkingConfig,
    BridgeOptions,
    EngineOptions,
    NemoOptions,
    OptimizerConfig,
    PrimusOptions,
    ProfilingConfig,
    Scalar,
    Size,
)
from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import RecordError
from tprimat.core.rows import DATA, RefuseUnknownKeys, document
from tprimat.core.workload import ATTENTION_ALONE, FullWorkload
from tprimat.records.environment import masked_environment
from tprimat.records.schema import Evidence, Machine, RunPrediction, RunRecord
from tprimat.records.store import from_json, json_document, read_bytes, to_json, write_atomically

__all__ = ["BenchmarkingConfig", "EngineOptions", "PrimusOptions", "Scalar"]  # for packages that import no configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimusStart(RefuseUnknownKeys):
    """The Primus that runs a plan."""

    program: str
    """primus-cli."""
    directory: str | None = None
    """Root of the checkout, in which Primus must start; None for an installed package."""
    version: str | None = None
    """From `git describe` on the checkout; None if that fails."""
    overrides: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen(RefuseUnknownKeys):
    """What the command line decides of a plan."""

    run_id: str = ""
    model: str
    """Key in config.yaml."""
    size: Size
    strategy: str
    engine: str
    """A name of engines/base.py."""
    engine_reason: str = ""
    """Why this engine, in words."""
    trainer: str | None = None
    """The module whose `train(plan)` runs on each rank of our worker; None where the framework starts its own processes, and
    in plans from before this field."""
    platform: PlatformName
    primus: PrimusStart | None = None
    """For the engine primus."""
    run_directory: str = ""
    """Holds this run's run.json, steps.jsonl and plan.json."""
    output_directory: str = ""
    """Holds benchmark_*.json, training_*.log and profiles."""
    command: tuple[str, ...] = ()
    """The user's command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Chosen):
    """Everything that a worker needs to know."""

    plan_version: Literal[2] = 2
    workload: FullWorkload
    nemo_recipe: str | None = None
    primus_config: str | None = None
    nodes: int
    gpus_per_node: int
    steps: int
    dataset: str
    """mock or text:PATH."""
    seed: int
    optimizer: OptimizerConfig
    engine_options: EngineOptions
    nemo: NemoOptions = field(default_factory=NemoOptions)
    """For the engine nemo."""
    bridge: BridgeOptions = field(default_factory=BridgeOptions)
    profiling: ProfilingConfig
    environment: dict[str, str]
    prediction: RunPrediction | None = None
    """Memory and time; None where they cannot be predicted, as on a CPU."""

    def begun_on(self, machine: Machine, **facts: Any) -> RunRecord:
        """Return the record of a run that begins now and has not reported anything yet, with what its engine knows."""
        shared = ("run_id", "model", "size", "strategy", "engine", "workload", "seed", "command", "prediction")
        known: dict[str, Any] = {"clock": "step_end", **{name: getattr(self, name) for name in shared}, **facts}
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return RunRecord(machine=machine, started_at=now, outcome="running", **known)


def plan_of(work: FullWorkload, **chosen: Any) -> RunPlan:
    """Return a plan of a workload that no configuration describes; fields that are not chosen are the usual."""
    usual: dict[str, Any] = {"run_id": "run", "model": work.shape.name, "size": "full", "strategy": "", "engine": "megatron"}
    usual |= {"platform": "nvidia", "nodes": 1, "gpus_per_node": 1, "steps": 20, "dataset": "mock", "seed": 1, "environment": {}}
    usual |= {"optimizer": OptimizerConfig(), "engine_options": EngineOptions(), "profiling": ProfilingConfig()}
    return RunPlan(workload=work, **{**usual, **chosen})


def write_plan(path: Path, plan: RunPlan) -> None:
    """Write a plan only for this user, without the values of unknown environment variables, which only the launcher needs."""
    written = replace(plan, environment=masked_environment(plan.environment))
    write_atomically(path, to_json(written, indent=2) + "\n", private=True)


def read_plan(path: Path) -> RunPlan:
    """Read a plan, without what older ones name and that is gone."""
    if not path.exists():
        fix = "./benchmark.py writes it when it starts the run; --dry-run only names the place"
        raise RecordError(f"There is no {path}.", where=str(path), fix=fix)
    document = json_document(read_bytes(path), path)
    if isinstance(document, dict):  # without what older plans name and that is gone
        for former in ("micro_batch_search", "micro_batch_memory_bytes", "tokenizer"):
            document.pop(former, None)
        for section, option in (name.split(".") for name in removed() if "." in name):
            if isinstance(options := document.get(section), dict):
                options.pop(option, None)
    return from_json(RunPlan, json.dumps(document), where=str(path))


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
    words = document(DATA / "traits.yaml")
    for fact, name in {**words["as_asked"], **(words["as_asked_of_experts"] if asked.shape.experts else {})}.items():
        if (planned := getattr(asked, fact)) is not None:  # a micro-batch that the run has to find
            yield name, planned, getattr(seen, fact)
    yield "virtual pipeline", asked.virtual_pipeline or 1, seen.virtual_pipeline
    yield "tokens a step", asked.tokens_per_step, evidence.tokens_per_step
    if asked.recompute == seen.recompute == "selective" and seen.recompute_modules is not None:
        yield "recomputed modules", ", ".join(asked.recompute_modules or ATTENTION_ALONE), ", ".join(seen.recompute_modules)
    if asked.recompute == seen.recompute == "full":
        yield "recomputed layers", asked.recompute_layers or "all", seen.recompute_layers or "all"
    if evidence.source == "running_framework":  # a log reports the parameters of one rank
        yield "parameters", asked.parameters, evidence.parameters
