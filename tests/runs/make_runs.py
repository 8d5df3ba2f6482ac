"""Synthetic runs for tests, each of which says so; the folders beside this file hold some, made by these functions."""

import math
from pathlib import Path

import numpy as np
from changes import evidence as evidence_of
from changes import record as record_of
from changes import replace

from tprimat.core.models import model_shape
from tprimat.records.schema import Machine, RunRecord, StepRecord
from tprimat.records.store import to_json

H100 = Machine(platform="cuda", accelerator="NVIDIA H100 80GB HBM3", gpus_per_node=8, nodes=1, memory_bytes=85017624576)
MI300X = Machine(platform="rocm", accelerator="AMD Instinct MI300X", gpus_per_node=8, nodes=1, memory_bytes=206141652992)
LAPTOP = Machine(platform="cpu", accelerator="Example CPU", gpus_per_node=2, nodes=1)
SYNTHETIC = evidence_of(source="log", notes=("synthetic data from tests/runs/make_runs.py, not a measurement",))


def a_run(run_id: str, **changes: object) -> RunRecord:
    """A completed run of Llama on 8 H100 unless said otherwise."""
    run = record_of(
        run_id=run_id,
        model="llama",
        shape=model_shape("llama-3.1-8b"),
        strategy="minimal_communication",
        engine="megatron",
        matmul_dtype="bf16",
        tensor_parallel=1,
        pipeline_parallel=1,
        data_parallel=8,
        micro_batch_sequences=1,
        global_batch_sequences=128,
        sequence_tokens=2048,
        machine=H100,
        started_at="2026-01-01T00:00:00Z",
        clock="step_end",
        outcome="completed",
        evidence=SYNTHETIC,
    )
    return replace(run, **changes)


def steps_of(run: RunRecord, seconds: np.ndarray, seed: int, gigabytes: float | None = 54.0) -> list[StepRecord]:
    """Steps with a falling loss, a warm-up of the learning rate, and nearly constant memory."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(seconds)
    return [
        StepRecord(
            step=i,
            step_seconds=round(float(value), 6),
            tokens=run.ran.global_batch_sequences * run.ran.sequence_tokens,
            loss=round(2 + 10 * math.exp(-i / 12) + 0.03 * rng.normal(), 5),
            grad_norm=round(1 + abs(rng.normal()), 5),
            learning_rate=3e-4 * min(1, i / 10),
            peak_allocated_bytes=None if gigabytes is None else int((gigabytes + 0.2 * (i > 3)) * 1e9),
            ended_at_seconds=round(float(end), 6),
        )
        for i, (value, end) in enumerate(zip(seconds, ends, strict=True), 1)
    ]


def step_times(level: float, seed: int, *, steps: int = 40, warmup: int = 3, noise: float = 0.008) -> np.ndarray:
    """A slow first stretch, then noise around a level."""
    seconds = level * (1 + noise * np.random.default_rng(seed).normal(size=steps))
    seconds[:warmup] *= np.linspace(6, 2, warmup)
    return seconds


def write_run(folder: Path, run: RunRecord, steps: list[StepRecord]) -> None:
    """run.json and steps.jsonl."""
    place = folder / "runs" / run.run_id
    place.mkdir(parents=True, exist_ok=True)
    (place / "run.json").write_text(to_json(run, indent=2) + "\n", encoding="utf8")
    (place / "steps.jsonl").write_text("".join(to_json(step) + "\n" for step in steps), encoding="utf8")
