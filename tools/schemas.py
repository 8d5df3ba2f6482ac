#!/usr/bin/env python3
"""Write the JSON Schema of each file that a run leaves behind into schemas/."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.page import page_parser, update_page  # noqa: E402
from tprimat.core.accelerators import Backend  # noqa: E402
from tprimat.core.rows import RefuseUnknownKeys, adapter  # noqa: E402
from tprimat.plan.schema import RunPlan  # noqa: E402
from tprimat.records.schema import ProbeRecord, RunMetrics, RunRecord, StepRecord, TelemetrySample  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo(RefuseUnknownKeys):
    """The hardware and the software on it."""

    device_name: str | None
    device_count: int | None
    """Ranks; on a CPU, processes."""
    software_stack: Backend
    framework: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSection(RefuseUnknownKeys):
    """How the model was split."""

    tensor_model_parallel_size: int | None
    pipeline_model_parallel_size: int | None
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int | None
    data_parallel_size: int | None
    gradient_accumulation_steps: int | None
    strategy_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection(RefuseUnknownKeys):
    """The workload."""

    micro_batch_size: int | None
    micro_batch_size_asked: int | Literal["auto"] | None
    global_batch_size: int | None
    sequence_length: int | None
    num_gpus: int | None
    precision: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformanceSection(RefuseUnknownKeys):
    """The metrics of the steady steps, without their spread (see `metrics`)."""

    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    avg_step_time_seconds: float
    median_step_time_seconds: float
    steps_per_second: float
    tflops_per_gpu: float | None
    mfu: float | None
    steps_measured: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkDocument(RefuseUnknownKeys):
    """One run: the familiar keys first, then the records themselves in SI units."""

    schema_version: int
    platform: Literal["nvd", "amd", "cpu", "other"]
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


DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENTS: dict[str, type] = {
    "benchmark": BenchmarkDocument,
    "run": RunRecord,
    "step": StepRecord,
    "plan": RunPlan,
    "probe": ProbeRecord,
    "telemetry": TelemetrySample,
}
"""File name before .schema.json -> type of a document, or of a line of a .jsonl file."""


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of one kind of document."""
    return {"$schema": DIALECT, **adapter(DOCUMENTS[name]).json_schema(mode="serialization")}


def main() -> int:
    """Exit status: 0; 1 where --check finds a schema that the code would write differently."""
    check = page_parser(__doc__).parse_args().check
    texts = {ROOT / "schemas" / f"{name}.schema.json": json.dumps(schema(name), indent=2) + "\n" for name in DOCUMENTS}
    return max(update_page(path, text, check=check, command="python3 tools/schemas.py") for path, text in texts.items())


if __name__ == "__main__":
    sys.exit(main())
