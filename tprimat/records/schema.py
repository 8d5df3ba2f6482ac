"""The records that runs and probes leave behind. Plain data, SI units, None where a value is absent."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from tprimat.core.accelerators import Backend
from tprimat.core.flops import FlopConvention
from tprimat.core.limits import (
    LARGEST_WHOLE,
    Count,
    Duration,
    FileName,
    Fraction,
    FreeForm,
    Instant,
    Moment,
    Name,
    NotNegative,
    Real,
    StepNumber,
    WholeNumber,
)
from tprimat.core.rows import RefuseUnknownKeys
from tprimat.core.workload import Workload
from tprimat.records.upgrade import upgraded_run

SCHEMA_VERSION = 2


def _known_version(version: int) -> int:
    if not 1 <= version <= SCHEMA_VERSION:
        message = f"this TPrimat reads versions up to {SCHEMA_VERSION}; update it to read the file"
        raise PydanticCustomError("version", "{message}", {"message": message})
    return version


Version = Annotated[int, AfterValidator(_known_version)]


Outcome = Literal["running", "completed", "out_of_memory", "timed_out", "hung", "interrupted", "diverged", "failed"]
Clock = Literal["step_end", "framework"]
StartUp = Literal["rank_started", "imported", "process_group", "model_built", "training"]
"""Stages of a rank's start: Python runs, libraries are imported, ranks are connected, the model is built, steps begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run did not complete."""

    outcome: Outcome
    cause: str
    """One line, never empty."""
    hint: str | None = None
    """What to try, in one line."""
    evidence: str | None = None
    """The line of the log that shows it."""
    kind: str | None = None
    """Name of the matching signature."""
    retry: bool = False
    """A second start may not have it: it comes from the network between the ranks, not from the plan."""
    cut_off: bool = False
    """The scheduler's time limit or a lost node ended the run, which might have completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(RefuseUnknownKeys):
    """One optimizer step over all ranks."""

    step: StepNumber
    """Counts from 1."""
    step_seconds: Duration
    """From the end of the previous step to the end of this one, on the slowest rank, with device work and data loading,
    and without validation."""
    tokens: WholeNumber | None = None
    """Tokens that all ranks trained on in this step."""
    loss: Real | None = None
    grad_norm: Real | None = None
    learning_rate: Real | None = None
    finite: bool = True
    """Loss and gradient norm are finite numbers."""
    peak_allocated_bytes: WholeNumber | None = None
    """Maximum inside the step, on the worst rank; on a CPU, of the process's resident set."""
    peak_reserved_bytes: WholeNumber | None = None
    ended_at_seconds: Moment | None = None
    """Since the run's started_at, on the clock of the telemetry, so that power readings can be matched with steps."""
    expert_load: NotNegative | None = None
    """Tokens of the busiest expert over the mean of all experts of its layer, mean over layers and micro-batches: 1 is even."""
    rank_load: NotNegative | None = None
    """The same of the ranks that share the experts: the busiest is the one that the others wait for."""
    dropped: Fraction | None = None
    """Share of the choices of experts that were dropped because an expert was full."""
    merged: Count = 1
    """Always 1; files of runs with more than 40,000 steps once held means of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(RefuseUnknownKeys):
    """The hardware of a run, as the machine itself names it."""

    platform: Backend
    accelerator: Name | None
    """Device name as torch or the vendor's SMI tool reports it; the processor's name on a CPU; None where a log omits it."""
    gpus_per_node: Count | None
    """Ranks on one node; on a CPU, processes."""
    nodes: Count | None
    memory_bytes: WholeNumber | None = None
    """Of one accelerator."""
    power_limit_watts: NotNegative | None = None
    driver: str | None = None

    @property
    def gpus(self) -> int | None:
        """World size; None where unknown."""
        return None if self.gpus_per_node is None or self.nodes is None else self.gpus_per_node * self.nodes


Grade = Literal["observed", "resolved", "stated"]
"""Of a fact: seen in the running program, resolved by the framework from its arguments, or what somebody wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord(RefuseUnknownKeys):
    """One of the machines of a run."""

    host: str
    accelerator: str | None
    """As in Machine."""
    gpus: Count | None
    """That a run there can see; None: no GPUs."""
    memory_bytes: WholeNumber | None = None
    """Of the smallest accelerator."""
    driver: str | None = None
    processor: str | None = None
    """Model of the host's processor; None in older records."""
    cores: Count | None = None
    """Of the processor, as many as a run may use; None in older records."""
    other_variables: dict[str, str | None] = field(default_factory=dict)
    """Variables that tune libraries and are set otherwise than on the first node -> value here; None: not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(RefuseUnknownKeys):
    """What ran, as the running framework or its log states it. None: not stated."""

    source: Literal["running_framework", "log"]
    workload: Workload = field(default_factory=Workload)
    """As far as it was seen."""
    world_size: Count | None = None
    tokens_per_step: Count | None = None
    parameters: WholeNumber | None = None
    """Over all ranks, each weight counted once."""
    transformer_engine: bool | None = None
    first_sequence: str | None = None
    """Name of the tokens of the first sequence that rank 0 trained on: equal for equal data in equal order."""
    graphs_compiled: WholeNumber | None = None
    """By torch.compile on rank 0; 0 with graphs_from_cache: the compile cache was warm."""
    graphs_from_cache: WholeNumber | None = None
    grades: dict[str, Grade] = field(default_factory=dict)
    """Of the facts above, by field. Where a fact has none, as in older records, records.evidence derives it."""
    notes: tuple[str, ...] = ()
    """Anything a reader must know, such as 'CPU-redirected, not a measure of speed'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource(RefuseUnknownKeys):
    """The log file that a record was read from."""

    path: str
    sha256: str | None = None
    dialect: str | None = None
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction(RefuseUnknownKeys):
    """What was predicted for a run before it started."""

    allocated_bytes: Count
    """Peak on the fullest rank."""
    reserved_bytes: Count
    """Peak that the allocator holds for it."""
    memory: dict[str, WholeNumber]
    """Part -> bytes at the peak."""
    stage: WholeNumber
    """Pipeline rank that needs most, from 0."""
    moment: str
    """What runs at the peak."""
    device_bytes: Count | None = None
    """What it takes of a device at most, with what the driver and NCCL take; None in records of before."""
    step_seconds: Duration | None = None
    """None where the accelerator is not known."""
    step_seconds_low: Duration | None = None
    """Nine in ten such steps take longer; None in records of before, too."""
    step_seconds_high: Duration | None = None
    time: dict[str, NotNegative] = field(default_factory=dict)
    """Part -> seconds of a step."""
    rates: str | None = None
    """Where the rates come from: probes of the machine, or published figures."""


@dataclass(frozen=True, kw_only=True)
class RunRecord(RefuseUnknownKeys):
    """One training run: what was asked for, what ran, how it ended. Its steps are in steps.jsonl next to it."""

    schema_version: Version = SCHEMA_VERSION
    run_id: FileName
    model: FileName
    """Key in config.yaml, such as llama."""
    size: Literal["full", "tiny"] = "full"
    strategy: Name | None
    engine: Name
    workload: Workload
    """What was asked for; of a log, what it states."""
    seed: Annotated[int, Field(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)] | None = None
    machine: Machine
    nodes: tuple[NodeRecord, ...] = ()
    """Each machine, in the order of the node ranks; empty in older records and in those from logs."""
    job: str | None = None
    """The scheduler and its name of the job that made the run, such as slurm 4711 or slurm 4711_3; None outside one."""
    software: dict[str, str] = field(default_factory=dict)
    """Package or driver -> version."""
    environment: dict[str, str] | None = None
    """Variables of rank 0 that tune its libraries, such as NCCL_P2P_DISABLE; None where the trainer does not say."""
    started_at: Instant | None
    ended_at: Instant | None = None
    start_up: dict[StartUp, Moment] = field(default_factory=dict)
    """Stage of rank 0's start -> seconds since started_at."""
    clock: Clock
    outcome: Outcome
    exit_code: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cause: str | None = None
    """One line: why the run did not complete."""
    hint: str | None = None
    """One line: what to try next."""
    cut_off: bool = False
    """The scheduler's time limit or a lost node ended the run, which might have completed: a sweep repeats it once."""
    evidence: Evidence | None = None
    mismatches: tuple[str, ...] = ()
    """Where evidence contradicts the request. Not empty: no analysis counts the run."""
    prediction: RunPrediction | None = None
    """None: not predicted, as on a CPU, or from before predictions."""
    engine_options: FreeForm = field(default_factory=dict)
    source: LogSource | None = None
    command: tuple[str, ...] = ()
    """The user's command line that started the run."""
    rank_seconds: tuple[NotNegative, ...] = ()
    """Median time that the passes of a step take each rank alone, without waiting for the gradients of others: extrapolated from
    what it had done before its last backward pass. Empty where the trainer does not say."""
    profiled_steps: tuple[StepNumber, ...] = ()
    """Steps that the profiler slowed down by warming up, recording or writing its trace: not a measure of speed."""
    steps_recorded: WholeNumber | None = None
    """Steps that were seen until the run ended: a steps.jsonl of a completed run with fewer has lost some."""

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, document: Any) -> Any:
        return upgraded_run(document) if isinstance(document, dict) else document

    @cached_property
    def ran(self) -> Workload:
        """What ran as far as it was seen, else what was asked for."""
        ran = self.workload if self.evidence is None else self.evidence.workload.over(self.workload)
        return replace(ran, virtual_pipeline=None) if ran.virtual_pipeline == 1 else ran

    @property
    def counts(self) -> bool:
        """Whether analyses may count the run."""
        return self.outcome == "completed" and not self.mismatches


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySample(RefuseUnknownKeys):
    """One reading of one accelerator during a run."""

    at_seconds: Moment
    """Since the run's started_at."""
    gpu: WholeNumber
    power_watts: NotNegative | None = None
    clock_hertz: NotNegative | None = None
    temperature_celsius: Real | None = None
    utilization: NotNegative | None = None
    """0..1, of the compute units."""
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord(RefuseUnknownKeys):
    """One timed operation. All samples are kept."""

    schema_version: Version = SCHEMA_VERSION
    kind: str
    """gemm, attention_forward, attention_backward, all_reduce, copy, mlp_step, ..."""
    variant: str | None = None
    """Library, backend or call: 'F.linear', 'cudnn', 'hipblaslt'."""
    shape: dict[str, WholeNumber]
    """Dimension or message size in bytes -> value."""
    dtype: str
    seconds: tuple[Duration, ...]
    flop: Annotated[int, Field(ge=0, le=10**30)] | None = None
    """In one repetition."""
    bytes: WholeNumber | None = None
    """Moved in one repetition."""
    machine: Machine
    software: dict[str, str] = field(default_factory=dict)
    started_at: Instant
    clock_hertz: NotNegative | None = None
    power_watts: NotNegative | None = None
    peak_allocated_bytes: WholeNumber | None = None
    """During preparation and repetitions, on the worst rank."""
    small: bool | None = None
    """Whether size and effort were those for a processor; None in older records."""
    error: str | None = None
    """Why there are no samples, such as an unavailable backend."""


# The metrics of a run.


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(RefuseUnknownKeys):
    """A number with its spread."""

    value: float
    low: float | None
    """Lower end of the 95 % interval; None for a single sample."""
    high: float | None
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(RefuseUnknownKeys):
    """The steady steps of a run, including both ends, and what was left out."""

    first_step: int
    last_step: int
    steps: int
    outliers: int
    """Steps inside the window more than 3 scaled MAD from the median. Throughput includes them."""
    rule: str | dict[str, str]
    """Why steps do not count, such as warm-up -> which, such as '1-8, 12'; a sentence in older files."""
    drift_per_step: float | None = None
    """Relative change of step time per step where a trend test is significant at 5 %, else None."""
    left_out: tuple[int, ...] = ()
    """Steps inside the window that do not count because they were profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(RefuseUnknownKeys):
    """Something to know about figures, as data; report/words.py puts it into a sentence."""

    kind: str
    subjects: tuple[str, ...] = ()
    """What it is about, such as what held the clocks back."""
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics(RefuseUnknownKeys):
    """The metrics of a run and its steps."""

    window: Window
    step_seconds: Estimate
    """Median step time with its 95 % interval."""
    mean_step_seconds: float
    """sum(step_seconds) / steps, the basis of throughput."""
    steps_per_second: float
    step_seconds_mad: float
    """Scaled median absolute deviation of the step times."""
    tokens_per_second: float | None
    tokens_per_second_per_gpu: Estimate | None
    flop_per_token: float | None
    flops_convention: FlopConvention
    model_flops_per_second_per_gpu: Estimate | None
    peak_dense_flops: float | None
    mfu: Estimate | None
    mfu_absent_because: Finding | None
    """A sentence in older files."""
    share_of_measured_gemm: float | None = None
    measured_gemm_flops: float | None = None
    """FLOP/s of one accelerator: the fastest matmul probed there in the run's dtype."""
    peak_memory_bytes: int | None
    """Peak allocated on the worst rank inside the window."""
    peak_reserved_bytes: int | None = None
    predicted_memory_error: float | None = None
    """The predicted peak over the measured one, minus 1."""
    predicted_step_error: float | None = None
    """The predicted step over the measured one, minus 1."""
    final_loss: float | None
    joules_per_token: float | None = None
    cost_per_million_tokens: float | None = None
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean, mean over the steady steps; None in a model without experts."""
    rank_load: float | None = None
    """The same of the ranks that share the experts."""
    dropped: float | None = None
    """Share of the choices of experts that were dropped, mean over the steady steps."""
    held_back: dict[str, float] | None = None
    """What held clocks back, such as 'power cap' -> share 0..1 of the readings during the steady steps; None: not read."""
    gpu_busy: float | None = None
    """Share 0..1 of the time in which any kernel ran on a GPU, mean of the driver's readings during the steady steps; None: not
    read."""
    warnings: tuple[Finding, ...] = ()
    """What to know about the figures; sentences in older files."""
