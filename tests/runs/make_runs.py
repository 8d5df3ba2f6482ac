"""Writes the runs that tests read. They are synthetic: step times come from a seeded generator, and each record says so.

python3 tests/runs/make_runs.py            writes beside this file
python3 tests/runs/make_runs.py FOLDER     writes there
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[parents]) for parents in (1, 2)]

from changes import evidence as evidence_of  # noqa: E402
from changes import record as record_of  # noqa: E402
from changes import replace  # noqa: E402

from tprimat.core.models import model_shape, tiny  # noqa: E402
from tprimat.records.schema import Machine, RunRecord, StepRecord  # noqa: E402
from tprimat.records.store import to_json  # noqa: E402

H100 = Machine(platform="cuda", accelerator="NVIDIA H100 80GB HBM3", gpus_per_node=8, nodes=1, memory_bytes=85017624576)
MI300X = Machine(platform="rocm", accelerator="AMD Instinct MI300X", gpus_per_node=8, nodes=1, memory_bytes=206141652992)
LAPTOP = Machine(platform="cpu", accelerator="Example CPU", gpus_per_node=2, nodes=1)
SYNTHETIC = evidence_of(source="log", notes=("synthetic data from tests/runs/make_runs.py, not a measurement",))

REBUILT = evidence_of(
    source="log", notes=("rebuilt by tests/runs/make_runs.py from published figures; the steps are not a measurement",)
)


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


def write_groups(folder: Path) -> None:
    """Three runs each on two machines, one run of another model, one of another strategy, a CPU run and a failed one."""
    for repeat in range(3):
        for name, machine, level, memory in (("h100", H100, 4.43, 54.0), ("mi300x", MI300X, 3.95, 118.0)):
            run = a_run(f"{name}-llama-{repeat}", machine=machine)
            between = 1 + 0.004 * np.random.default_rng(77 + repeat).normal()
            write_run(folder / name, run, steps_of(run, step_times(level * between, 10 * repeat + len(name)), repeat, memory))
    qwen = a_run("h100-qwen-0", model="qwen", shape=model_shape("qwen-2.5-7b"))
    write_run(folder / "h100", qwen, steps_of(qwen, step_times(4.1, 40), 40, 57.0))
    split = a_run("h100-llama-split", strategy="memory_optimized", tensor_parallel=4, pipeline_parallel=2, data_parallel=1)
    write_run(folder / "h100", split, steps_of(split, step_times(7.9, 41), 41, 21.0))
    small = {"size": "tiny", "shape": tiny(model_shape("llama-3.1-8b")), "global_batch_sequences": 4, "sequence_tokens": 64}
    cpu = a_run("cpu-llama-0", machine=LAPTOP, matmul_dtype="fp32", data_parallel=2, **small)
    write_run(folder / "cpu", cpu, steps_of(cpu, step_times(0.12, 42), 42, None))
    failed = a_run("h100-qwen-oom", model="qwen", outcome="out_of_memory", exit_code=1, cause="CUDA out of memory on rank 3")
    write_run(folder / "h100", failed, [])


def published_runs() -> list[tuple[RunRecord, float]]:
    """The runs behind the first TPrimat's published figures, with the unrounded tokens/s that give all of them.

    7,597,433,417 tokens a day leave 87,933.257 tokens/s; step times of 14.91, 15.22, 3.32 and 4.43 s leave the tokens a step.
    """
    qwen, llama = (
        {"model": name, "shape": model_shape(key)} for name, key in (("qwen", "qwen-2.5-7b"), ("llama", "llama-3.1-8b"))
    )
    amd = {"machine": MI300X, "engine": "primus", "clock": "framework", "evidence": REBUILT}
    nvidia = {"machine": H100, "engine": "nemo", "clock": "framework", "evidence": REBUILT}
    return [
        (a_run("published-mi300x-qwen", **amd, **qwen, global_batch_sequences=640), 7_597_433_417.5 / 86_400),
        (a_run("published-mi300x-llama", **amd, **llama, sequence_tokens=8192), 68_875.0),
        (a_run("published-h100-qwen", **nvidia, **qwen), 78_877.0),
        (a_run("published-h100-llama", **nvidia, **llama), 59_175.0),
    ]


def write_published(folder: Path) -> None:
    """Twelve equal steps each: only the rate was published."""
    for run, rate in published_runs():
        tokens = run.ran.global_batch_sequences * run.ran.sequence_tokens
        steps = [StepRecord(step=i, step_seconds=tokens / rate, tokens=tokens) for i in range(1, 13)]
        write_run(folder / "published", run, steps)


def foreign_documents() -> dict[str, object]:
    """Result files in the forms that other programs write."""
    seconds = [round(float(value), 5) for value in step_times(2.5, 50, steps=24, warmup=1)]
    loss = [round(10 - 0.2 * i, 5) for i in range(24)]
    training = {"max_steps": 24, "global_batch_size": 64, "micro_batch_size": 1, "sequence_length": 2048, "num_gpus": 8}
    amd = {"device_count": 8, "device_name": "AMD Instinct MI300X", "total_memory_gb": 206.14165, "software_version": "7.1.0"}
    nvidia = {"device_count": 8, "device_name": "NVIDIA H100 80GB HBM3", "total_memory_gb": 85.01789, "pytorch_version": "2.7.0"}
    layout = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "data_parallel_size": 4}
    series = {"step_times": seconds, "loss_values": loss, "learning_rates": [1e-5] * 24}
    return {
        "train_amd_prim_llama.json": {
            "platform": "amd",
            "gpu_info": {**amd, "software_stack": "primus"},
            "timestamp": "2026-02-02T15:28:08",
            "parallelism_config": {"strategy_name": "TP1_PP2_SP0", **layout, "gradient_accumulation_steps": 16},
            "training_config": training,
            **series,
        },
        "train_nvd_nemo_qwen.json": {
            "platform": "nvd",
            "gpu_info": {**nvidia, "software_stack": "nemo"},
            "parallelism_config": {"strategy_name": "unknown", **layout},
            "training_config": {**training, "parallel_strategy": "balanced"},
            **series,
        },
        "benchmark_rocm_llama.json": {
            "platform": "amd",
            "gpu_info": {**amd, "software_stack": "rocm", "pytorch_version": ""},
            "training_config": {"max_steps": 24, "global_batch_size": 128, "sequence_length": 2048, "num_gpus": 8},
            "raw_step_times": [round(4 * value, 5) for value in seconds],
            "source": "primus_log_extraction",
            "memory_metrics": {"avg_memory_allocated_gb": 117.99, "peak_memory_allocated_gb": 117.99},
        },
        "benchmark_cuda_qwen.json": {
            "platform": "nvd",
            "gpu_info": {**nvidia, "software_stack": "cuda"},
            "parallelism_config": {"strategy_name": "unknown"},
            "training_config": {**training, "global_batch_size": "N/A", "sequence_length": "N/A", "micro_batch_size": "N/A"},
            "raw_step_times": seconds,
            "raw_loss_values": [],
            "raw_memory_values": [54.5] * 24,
            "raw_learning_rates": [1e-5] * 20,
        },
    }


def write_all(folder: Path) -> None:
    """Everything under one folder."""
    write_groups(folder)
    write_published(folder)
    (folder / "foreign").mkdir(parents=True, exist_ok=True)
    for name, document in foreign_documents().items():
        (folder / "foreign" / name).write_text(json.dumps(document) + "\n", encoding="utf8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    write_all(parser.parse_args().folder)
