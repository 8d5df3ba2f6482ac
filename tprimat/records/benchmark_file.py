"""benchmark_{cuda|rocm|cpu}_{model}.json, the result file that users know: its writer and reader.

tools/schemas.py has its types, for the published JSON Schema. The familiar keys come first, in the units that their readers know:
seconds, TFLOP/s, GB (1e9 bytes), fractions 0..1. `run`, `metrics` and `steps` are the records themselves, in SI units.
`raw_memory_values` are the peaks allocated inside each step on the worst rank.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from tprimat.core.accelerators import SHORT_NAMES
from tprimat.core.limits import Fraction
from tprimat.core.rows import adapter, placed
from tprimat.records.schema import SCHEMA_VERSION, RunMetrics, RunRecord, StepRecord, TelemetrySample, Window
from tprimat.records.sharing import shareable
from tprimat.records.store import as_document, checked, rising, write_atomically

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a file states of its telemetry, which is not with it. None: nothing that can be."""

    held_back: dict[str, Fraction] | None = None
    gpu_busy: Fraction | None = None
    joules_per_token: Annotated[float, Field(gt=1e-9, lt=1e9)] | None = None
    window: Window | None = None
    """The steps of which it states energy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run with its steps, from any source."""

    run: RunRecord
    steps: tuple[StepRecord, ...]
    path: Path
    """File or folder that it was read from."""
    telemetry: tuple[TelemetrySample, ...] = ()
    stated: Stated = Stated()
    stated_tokens_per_second: float | None = None
    """What a file of another program states in addition to its step times."""


def benchmark_file_name(run: RunRecord) -> str:
    """Return a name such as benchmark_cuda_llama.json."""
    return f"benchmark_{run.machine.platform}_{run.model}.json"


def benchmark_document(run: RunRecord, steps: Sequence[StepRecord], metrics: RunMetrics | None) -> dict[str, Any]:
    """Return the file's content. Without metrics (no steady step was measured) they are null."""
    steps_document = json.loads(adapter(tuple[StepRecord, ...]).dump_json(tuple(steps)))  # not as_document, which keeps NaN
    peaks = [step["peak_allocated_bytes"] for step in steps_document]
    document = placed("documents.benchmark_file", run=run) | {
        "schema_version": SCHEMA_VERSION,
        "platform": SHORT_NAMES[run.machine.platform],
        "raw_step_times": [step["step_seconds"] for step in steps_document],
        "raw_loss_values": [step["loss"] for step in steps_document],
        "raw_memory_values": [None if peak is None else peak / GB for peak in peaks],
        "raw_learning_rates": [step["learning_rate"] for step in steps_document],
    }
    if metrics is not None:
        flops = metrics.model_flops_per_second_per_gpu
        rate = None if flops is None else flops.value / 1e12
        document["performance_metrics"] = placed("documents.performance_metrics", metrics=metrics) | {"tflops_per_gpu": rate}
    return {
        **document,
        "run": as_document(run),
        "metrics": None if metrics is None else as_document(metrics),
        "steps": steps_document,
    }


def write_benchmark_file(path: Path, run: RunRecord, steps: Sequence[StepRecord], metrics: RunMetrics | None) -> None:
    """Write the document atomically."""
    write_atomically(path, benchmark_text(run, steps, metrics))


def benchmark_text(run: RunRecord, steps: Sequence[StepRecord], metrics: RunMetrics | None) -> str:
    """Return the content of the file, which holds what may leave this machine."""
    return json.dumps(shareable(benchmark_document(run, steps, metrics)), indent=2, allow_nan=False) + "\n"


def own_result(document: dict[str, Any], path: Path) -> RunResult:
    """Return the records of a document that this program wrote; refuse what does not fit this schema version."""
    run = checked(RunRecord, document["run"], path)
    steps = rising(checked(tuple[StepRecord, ...], document["steps"], path), path)
    stated, metrics = Stated(), document.get("metrics")
    if document.get("schema_version", SCHEMA_VERSION) in range(1, SCHEMA_VERSION + 1) and isinstance(metrics, dict):
        with contextlib.suppress(ValidationError):
            stated = adapter(Stated).validate_python(metrics)
    return RunResult(run=run, steps=steps, path=path, stated=stated)
