"""What stands in benchmark_{cuda|rocm|cpu}_{model}.json, as types: the published JSON Schema is made from them.

Units are those that the file's readers know: seconds, TFLOP/s, GB (1e9 bytes), fractions 0..1.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tprimat.record.derived import RunMetrics
from tprimat.record.schema import Platform, RunRecord, StepRecord

REFUSE_UNKNOWN_KEYS: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """The hardware and the software on it."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    device_name: str | None
    device_count: int | None
    """Ranks; on a CPU, processes."""
    software_stack: Platform
    framework: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSection:
    """How the model was split."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    tensor_model_parallel_size: int | None
    pipeline_model_parallel_size: int | None
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int | None
    data_parallel_size: int | None
    gradient_accumulation_steps: int | None
    strategy_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection:
    """The workload."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    micro_batch_size: int | None
    micro_batch_size_asked: int | Literal["auto"] | None
    global_batch_size: int | None
    sequence_length: int | None
    num_gpus: int | None
    precision: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformanceSection:
    """The metrics of the steady steps, without their spread (that stands in `metrics`)."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    avg_step_time_seconds: float
    median_step_time_seconds: float
    steps_per_second: float
    tflops_per_gpu: float | None
    mfu: float | None
    steps_measured: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkDocument:
    """One run: the familiar keys first, then the records themselves in SI units."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    schema_version: int
    platform: Literal["nvd", "amd", "cpu"]
    gpu_info: GpuInfo
    parallelism_config: ParallelismSection
    training_config: TrainingSection
    performance_metrics: PerformanceSection | None
    """None where no steady step was measured."""
    raw_step_times: tuple[float, ...]
    raw_loss_values: tuple[float | None, ...]
    raw_memory_values: tuple[float | None, ...]
    raw_learning_rates: tuple[float | None, ...]
    run: RunRecord
    metrics: RunMetrics | None
    steps: tuple[StepRecord, ...]
