"""What a run will do: the one document that goes into a worker (plan.json)."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from tprimat.config.schema import (
    REMOVED_ENGINE_OPTIONS,
    EngineName,
    EngineOptions,
    OptimizerConfig,
    PlatformName,
    Precision,
    PrimusLauncher,
    PrimusOptions,
    ProfilingConfig,
    Recompute,
    Scalar,
    Size,
)
from tprimat.errors import RecordError
from tprimat.facts.models import ModelShape
from tprimat.records.files import from_json, read_text, to_json, write_atomically
from tprimat.records.schema import MicroBatchSearch

__all__ = [
    "Batch",
    "EngineName",
    "EngineOptions",
    "Layout",
    "PrimusLauncher",
    "PrimusOptions",
    "PrimusStart",
    "RunPlan",
    "Scalar",
]

PLAN_VERSION: Literal[1] = 1
REFUSE_UNKNOWN_KEYS: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one model is split over ranks. All degrees are known, the data-parallel one derived."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    tensor: int = 1
    """Ranks that share every matrix."""
    pipeline: int = 1
    """Stages that share the layers."""
    virtual_pipeline: int | None = None
    """Model chunks on each stage; None without interleaving."""
    context: int = 1
    """Ranks that share every sequence."""
    expert: int = 1
    """Ranks that share the experts."""
    data: int = 1
    """Replicas: what is left over."""
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.context * self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step trains on."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    micro_batch_sequences: int | Literal["auto"]
    global_batch_sequences: int
    sequence_tokens: int
    accumulation_steps: int | None
    """Micro-batches of one replica in a step; None while the micro-batch is still to be found."""

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.global_batch_sequences * self.sequence_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimusStart:
    """Which Primus carries out a plan, and how it is started."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    program: str
    """primus-cli, or run_pretrain.sh for the launcher script."""
    launcher: PrimusLauncher
    directory: str | None = None
    """Root of the checkout, from which Primus must be started; None for an installed package."""
    version: str | None = None
    """As git describes the checkout; None where it cannot."""
    image: str | None = None
    slurm_arguments: tuple[str, ...] = ()
    overrides: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that a worker needs to know."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    plan_version: Literal[1] = PLAN_VERSION
    run_id: str
    model: str
    """Key in config.yaml."""
    shape: ModelShape
    size: Size
    nemo_recipe: str | None = None
    primus_config: str | None = None
    primus: PrimusStart | None = None
    """For the engine primus."""
    strategy: str
    engine: EngineName
    engine_reason: str
    """Why this engine, in words."""
    platform: PlatformName
    nodes: int
    gpus_per_node: int
    layout: Layout
    batch: Batch
    micro_batch_search: MicroBatchSearch | None = None
    """How the micro-batch was found; None where the user gave it, or where it is still "auto": the worker then looks for it."""
    micro_batch_memory_bytes: int | None = None
    """Of each rank, for a search to fill; None: all that it has."""
    steps: int
    precision: Precision
    recompute: Recompute
    dataset: str
    """mock or text:PATH."""
    tokenizer: str | None
    seed: int
    optimizer: OptimizerConfig
    engine_options: EngineOptions
    profiling: ProfilingConfig
    environment: dict[str, str]
    run_directory: str
    """Where run.json, steps.jsonl and plan.json of this run stand."""
    command: tuple[str, ...] = ()
    """The user's command line."""
    output_directory: str
    """Where benchmark_*.json, training_*.log and profiles stand."""


# plan.json: the one document that goes into a worker.


def write_plan(path: Path, plan: RunPlan) -> None:
    """Write a plan.

    Raises:
        RecordError: the folder cannot be written.
    """
    write_atomically(path, to_json(plan, indent=2) + "\n")


def read_plan(path: Path) -> RunPlan:
    """Read a plan.

    Raises:
        RecordError: missing, damaged, or of another version.
    """
    if not path.exists():
        fix = "./benchmark.py writes it when it starts the run; --dry-run only names the place"
        raise RecordError(f"There is no {path}.", where=str(path), fix=fix)
    return from_json(RunPlan, _without_removed_options(read_text(path)), where=str(path))


def _without_removed_options(text: str) -> str:
    """Leave out the engine options that older plans name and that are gone; anything damaged stays for `from_json` to report."""
    try:
        document = json.loads(text)
        options = document["engine_options"]
        document["engine_options"] = {name: value for name, value in options.items() if name not in REMOVED_ENGINE_OPTIONS}
    except (ValueError, LookupError, TypeError, AttributeError):
        return text
    return json.dumps(document)
