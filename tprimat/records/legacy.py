"""Result files of other programs and older versions, read into the same records as our own.

Their contents differ: `raw_step_times` or `step_times`, `parallelism_config` or `parallelism` or neither, "N/A" where a
value is missing, a `software_stack` of cuda, rocm, nemo or primus. What they omit stays None, above all the dtype.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tprimat.core.accelerators import BACKEND_OF_ANY_NAME, DTYPES
from tprimat.core.errors import RecordError
from tprimat.core.limits import LARGEST_REAL, finite_or_none
from tprimat.core.models import model_shape
from tprimat.core.rows import DATA
from tprimat.core.rows import document as yaml_document
from tprimat.core.workload import Workload
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import Evidence, LogSource, Machine, RunRecord, StepRecord
from tprimat.records.store import checked

NAMES: Mapping[str, Any] = yaml_document(DATA / "foreign_files.yaml")
BILLIONS = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s?b(?![a-z])")
OTHER_VERSION = re.compile(NAMES["other_versions"])
MODELS = {"llama": "llama-3.1-8b", "qwen": "qwen-2.5-7b"}
"""What these names mean in TPrimat's files."""


def read_legacy(document: Mapping[str, Any], path: Path, content: bytes) -> RunResult:
    """Read a run from a file's JSON object; the hash of its bytes becomes the run's id, so that a copy counts once.

    The file's name may hold model and engine. Without step times or a known platform it is refused.
    """
    reader, digest = _Reader(document, path), hashlib.sha256(content).hexdigest()
    steps, model = _steps(reader), _model(reader)
    notes = ["read from a file of another program, which does not prove what ran"]
    machine = _machine(reader, notes)
    peak = reader.find("peak_memory_allocated_gb")
    if peak is not None and not any(step.peak_allocated_bytes for step in steps):
        notes.append(f"peak memory of the whole run {peak} GB; none by step")
    dtype, stack = reader.text("matmul_dtype", "precision"), reader.text("software_stack") or "software"
    versions = {"torch": reader.text("pytorch_version"), stack: reader.text("software_version")}
    counts: dict[str, Any] = {field: reader.whole(*names) for field, names in NAMES["counts"].items()}
    run = RunRecord(
        run_id=f"foreign-{digest[:16]}",
        model=model,
        strategy=reader.text("strategy_name", "strategy", "parallel_strategy"),
        engine=_engine(reader),
        workload=Workload(
            shape=model_shape(MODELS[model]) if model in MODELS else None,
            matmul_dtype=dtype if dtype in DTYPES else None,  # names of mixed precision are ambiguous
            **counts,
        ),
        machine=machine,
        software={name: version for name, version in versions.items() if version is not None},
        started_at=None,
        clock="framework",
        outcome="completed",
        evidence=Evidence(source="log", notes=tuple(notes)),
        source=LogSource(path=str(path), sha256=digest, dialect="benchmark json"),
    )
    return RunResult(run=checked(RunRecord, run, path), steps=steps, path=path, stated_tokens_per_second=_stated_rate(document))


def _stated_rate(document: Mapping[str, Any]) -> float | None:
    metrics = document.get("performance_metrics")
    rate = metrics.get("tokens_per_second") if isinstance(metrics, Mapping) else None
    known = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < LARGEST_REAL
    return rate if known else None


class _Reader:
    """Finds a value by any of its names in any section of a file."""

    def __init__(self, document: Mapping[str, Any], path: Path) -> None:
        self.document = document
        self.path = path
        self.sections = [*(document[name] for name in NAMES["sections"] if isinstance(document.get(name), Mapping)), document]

    def find(self, *names: str) -> Any:
        """Return the first value that is not a word for absent."""
        for section in self.sections:
            for name in names:
                value = section.get(name)
                if value is not None and not (isinstance(value, str) and value.lower() in NAMES["absent"]):
                    return value
        return None

    def text(self, *names: str) -> str | None:
        """Return a value as text."""
        value = self.find(*names)
        return None if value is None else str(value)

    def whole(self, *names: str) -> int | None:
        """Return a positive whole number."""
        value = self.find(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf or value != int(value):
            raise self.error(f"{names[0]} is {value!r}.", "It must be a whole number of 1 or more.")
        return int(value)

    def numbers(self, *names: str) -> list[float | None]:
        """Return the first list of numbers under some names, one a step; empty where there is none."""
        values: list[Any] = next((one for name in names if isinstance(one := self.document.get(name), list) and one), [])
        for value in values:
            if isinstance(value, bool) or not (value is None or isinstance(value, int | float)):
                raise self.error(f"{' or '.join(names)} holds {value!r}.", "Its entries are numbers.")
        return [None if value is None else float(value) if abs(value) <= LARGEST_REAL else math.inf for value in values]

    def bytes_of(self, name: str) -> int | None:
        """Return gigabytes in bytes."""
        gigabytes = self.find(name)
        if gigabytes is None:
            return None
        if isinstance(gigabytes, bool) or not isinstance(gigabytes, int | float) or not 0 <= gigabytes < LARGEST_REAL:
            raise self.error(f"{name} holds {gigabytes!r}.", "Memory is a finite number of gigabytes.")
        return round(gigabytes * 1e9)

    def error(self, what: str, why: str) -> RecordError:
        """Return an error that names the file."""
        return RecordError(f"{self.path}: {what}", where=str(self.path), why=why)


def _steps(reader: _Reader) -> tuple[StepRecord, ...]:
    seconds = reader.numbers("raw_step_times", "step_times")
    if not seconds:
        raise reader.error("no step times.", "A result holds raw_step_times or step_times: a list of seconds, one per step.")
    batch, length = reader.whole("global_batch_size"), reader.whole("sequence_length")
    absent = [None] * len(seconds)
    columns = [reader.numbers(*names) for names in NAMES["columns"]]
    losses, rates, memory = (column if len(column) == len(seconds) else absent for column in columns)  # else of something else
    rows = [
        {
            "step": number,
            "step_seconds": value,
            "tokens": batch * length if batch and length else None,
            "loss": finite_or_none(loss),
            "learning_rate": rate,
            "finite": loss is None or math.isfinite(loss),
            "peak_allocated_bytes": round(gigabytes * 1e9) if gigabytes and math.isfinite(gigabytes) else gigabytes,
        }
        for number, (value, loss, rate, gigabytes) in enumerate(zip(seconds, losses, rates, memory, strict=True), start=1)
    ]
    return checked(tuple[StepRecord, ...], rows, reader.path)


def _model(reader: _Reader) -> str:
    """Return llama or qwen where the file says so, or without a model in it its name; else the model as the file states it."""
    stated = reader.text("model", "model_name")
    name = (reader.path.stem if stated is None else stated).lower()
    known = [model for model in MODELS if model in name]
    if len(known) == 1 and not OTHER_VERSION.search(name) and set(BILLIONS.findall(name)) <= set(NAMES["billions"][known[0]]):
        return known[0]
    return (stated or "").rstrip("/").rpartition("/")[2] or reader.path.stem


def _engine(reader: _Reader) -> str:
    words = [reader.text("software_stack") or "", str(reader.document.get("source", "")), reader.path.stem]
    parts = [part for text in words for part in text.lower().split("_")]
    engines: Mapping[str, str] = NAMES["engines"]
    return next((engines[part] for part in parts if part in engines), "unknown")


def _machine(reader: _Reader, notes: list[str]) -> Machine:
    world, on_node = reader.whole("num_gpus"), reader.whole("device_count")
    nodes = None
    if world is not None and on_node is not None and world % on_node == 0:
        nodes = world // on_node
    elif world is not None or on_node is not None:
        on_node, nodes = world or on_node, 1
        notes.append(f"{on_node} GPUs taken as one node: the file gives one count only, or two that disagree")
    names = (reader.text("software_stack"), reader.text("platform"))
    platform = next((BACKEND_OF_ANY_NAME[name.lower()] for name in names if name and name.lower() in BACKEND_OF_ANY_NAME), None)
    if platform is None:
        raise reader.error(f"platform is {reader.document.get('platform')!r}.", f"One of {', '.join(BACKEND_OF_ANY_NAME)}.")
    return Machine(
        platform=platform,
        accelerator=reader.text("device_name"),
        gpus_per_node=on_node,
        nodes=nodes,
        memory_bytes=reader.bytes_of("total_memory_gb"),
    )
