"""How the largest micro-batch that fits was found, where `micro_batch_size: auto` was asked for."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tprimat.facts.models import ModelShape
from tprimat.facts.platforms import Backend

REFUSE_UNKNOWN_KEYS: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTrial:
    """One size, tried in a training step with the real model and optimizer."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    micro_batch_sequences: int
    peak_bytes: int | None
    """Allocated at most in the step, on the worst rank; None: a rank ran out of memory."""
    limit_bytes: int | None
    """What training may allocate on the rank that has least; None: it ran out before the limit was read."""

    @property
    def fits(self) -> bool:
        """Whether a run may take this size."""
        return self.peak_bytes is not None and self.limit_bytes is not None and self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSearch:
    """What was tried, and what came of it. The size that was found stands in the plan's batch and in the record."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    candidates: tuple[int, ...]
    """Sizes that divide the batch, the smallest first."""
    kept_free: float
    """Share 0..1 of the memory that the limits leave out, for what the allocator cannot use and later steps may add."""
    trials: tuple[MicroBatchTrial, ...]
    """In the order in which they were made."""
    predicted_bytes: dict[int, int]
    """Size -> what it would allocate, for larger ones that were not tried: on the line through the two largest that were."""


# What happened: the records that runs leave behind. Plain data, SI units, None where a value is absent.

SCHEMA_VERSION = 1

Outcome = Literal["running", "completed", "out_of_memory", "timed_out", "hung", "interrupted", "diverged", "failed"]
Clock = Literal["step_end", "framework"]
StartUp = Literal["rank_started", "imported", "process_group", "model_built", "training"]
"""Stages of a rank's start: Python runs, libraries are imported, ranks know each other, weights are there, steps begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, as all ranks together saw it."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    step: int
    """Counts from 1."""
    step_seconds: float
    """From the end of the step before to the end of this one, on the slowest rank: device work and data loading included."""
    tokens: int | None = None
    """Tokens that all ranks together trained on in this step."""
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    finite: bool = True
    """Loss and gradient norm are finite numbers."""
    peak_allocated_bytes: int | None = None
    """Maximum inside the step, on the worst rank."""
    peak_reserved_bytes: int | None = None
    ended_at_seconds: float | None = None
    """Since the run's started_at, on the clock that telemetry uses: lets power readings be laid over steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware that a run used, as the machine itself names it."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    platform: Backend
    accelerator: str | None
    """Device name as torch or the vendor's SMI tool reports it; the processor's name on a CPU; None when a log does not tell."""
    gpus_per_node: int | None
    """Ranks on one node; on a CPU these are processes."""
    nodes: int | None
    memory_bytes: int | None = None
    """Of one accelerator."""
    power_limit_watts: float | None = None
    driver: str | None = None

    @property
    def gpus(self) -> int | None:
        """World size, None when unknown."""
        return None if self.gpus_per_node is None or self.nodes is None else self.gpus_per_node * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the running framework, or its log, said that it ran. None: it did not say."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    source: Literal["running_framework", "log"]
    world_size: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    virtual_pipeline: int | None = None
    context_parallel: int | None = None
    expert_parallel: int | None = None
    data_parallel: int | None = None
    sequence_parallel: bool | None = None
    micro_batch_sequences: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None
    tokens_per_step: int | None = None
    parameter_dtype: str | None = None
    """Of the weights that the forward pass multiplies with, such as 'bfloat16'."""
    matmul_dtype: str | None = None
    """What the matrix units really ran: bf16, fp8, fp16, tf32, fp32."""
    gradient_dtype: str | None = None
    parameters: int | None = None
    """Counted over all ranks, each weight once."""
    recompute: Literal["none", "selective", "full"] | None = None
    attention: str | None = None
    transformer_engine: bool | None = None
    optimizer: str | None = None
    data: str | None = None
    graphs_compiled: int | None = None
    """By torch.compile on rank 0; 0 beside graphs_from_cache: the compile cache was warm."""
    graphs_from_cache: int | None = None
    notes: tuple[str, ...] = ()
    """Anything a reader must know, such as 'CPU-redirected, not a measure of speed'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Bytes on the worst rank."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What was expected before the launch, kept beside what was measured."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    memory_bytes: MemoryPrediction | None = None
    step_seconds: float | None = None
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """The log file that a record was parsed from."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    path: str
    sha256: str | None = None
    dialect: str | None = None
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One training run: what was asked, what ran, how it ended. Its steps stand beside it in steps.jsonl."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    schema_version: int = SCHEMA_VERSION
    run_id: str
    model: str
    """Key in config.yaml, such as llama."""
    size: Literal["full", "tiny"] = "full"
    shape: ModelShape | None = None
    strategy: str | None
    engine: str
    matmul_dtype: str | None
    """What really ran where evidence tells; otherwise what was asked for."""
    recompute: Literal["none", "selective", "full"] | None = None
    tensor_parallel: int | None
    pipeline_parallel: int | None
    virtual_pipeline: int | None = None
    context_parallel: int | None = None
    expert_parallel: int | None = None
    data_parallel: int | None
    micro_batch_sequences: int | None
    micro_batch_search: MicroBatchSearch | None = None
    """Where the user asked for auto: what was tried to find micro_batch_sequences."""
    global_batch_sequences: int | None
    sequence_tokens: int | None
    seed: int | None = None
    machine: Machine
    software: dict[str, str] = field(default_factory=dict)
    """Package or driver -> version."""
    started_at: str | None
    """ISO 8601, UTC."""
    ended_at: str | None = None
    start_up: dict[StartUp, float] = field(default_factory=dict)
    """Stage of rank 0's start -> seconds since started_at."""
    clock: Clock
    outcome: Outcome
    exit_code: int | None = None
    cause: str | None = None
    """One line: why the run did not complete."""
    hint: str | None = None
    """One line: what to try next."""
    evidence: Evidence | None = None
    mismatches: tuple[str, ...] = ()
    """Where evidence contradicts what was asked. Not empty: no analysis counts the run."""
    prediction: Prediction | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    source: LogSource | None = None
    command: tuple[str, ...] = ()
    """The user's command line that made the run."""
    profiled_steps: tuple[int, ...] = ()
    """Steps that the profiler slowed down, by warming up, recording or writing its trace: they are no measure of speed."""

    @property
    def counts(self) -> bool:
        """Whether an analysis may count the run."""
        return self.outcome == "completed" and not self.mismatches

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches that one data-parallel rank runs in a step."""
        parts = (self.global_batch_sequences, self.micro_batch_sequences, self.data_parallel)
        if None in parts:
            return None
        whole, micro, ranks = (part for part in parts if part is not None)
        return whole // (micro * ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySample:
    """One reading of one accelerator while a run was under way."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    at_seconds: float
    """Since the run's started_at."""
    gpu: int
    power_watts: float | None = None
    clock_hertz: float | None = None
    temperature_celsius: float | None = None
    utilization: float | None = None
    """0..1, of the compute units."""
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """One operation, timed. All samples are kept."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    schema_version: int = SCHEMA_VERSION
    kind: str
    """gemm, attention_forward, attention_backward, all_reduce, copy, mlp_step, ..."""
    variant: str | None = None
    """Library, backend or call: 'F.linear', 'cudnn', 'hipblaslt'."""
    shape: dict[str, int]
    """Dimension or message size in bytes -> value."""
    dtype: str
    seconds: tuple[float, ...]
    flop: int | None = None
    """In one repetition."""
    bytes: int | None = None
    """Moved in one repetition."""
    machine: Machine
    software: dict[str, str] = field(default_factory=dict)
    started_at: str
    clock_hertz: float | None = None
    power_watts: float | None = None
    peak_allocated_bytes: int | None = None
    """While it was prepared and repeated, on the worst rank."""
    error: str | None = None
    """Why there are no samples, such as a backend that is not available."""
