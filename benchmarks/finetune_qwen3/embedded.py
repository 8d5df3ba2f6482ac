"""Full training of Qwen3 8B on the embedded engine: one call of ./benchmark.py for each dtype."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tprimat.core.accelerators import PLATFORM_OF
from tprimat.engines.base import Command
from tprimat.launch.process import python_environment
from tprimat.records.schema import Machine

ROOT = Path(__file__).resolve().parents[2]
MODEL = "qwen3-8b"
STRATEGY = "minimal_communication"
PRECISIONS = ("bf16", "fp8")
SEQUENCES_PER_DEVICE, SEQUENCE_TOKENS = 14, 8192
"""The batch of the published runs; the embedded engine cuts it into micro-batches of 2."""
LIMIT_FLAG = "--time-budget"
"""The flag of this benchmark that allows longer runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all runs of one call share."""

    machine: Machine | None
    """None: this machine has no GPU, and a tiny Qwen3 trains on processes."""
    ranks: int
    steps: int
    limit_seconds: float | None
    """Time limit of a run."""


def embedded_command(precision: str, folder: Path, training: Training) -> Command:
    """Return the command of one run, which writes its records into the folder and does not repeat a run that counts."""
    machine = training.machine
    platform = PLATFORM_OF[machine.platform if machine else "cpu"]
    layout = f"parallelism.{STRATEGY}.{MODEL}.{platform}"
    settings = [
        f"models.{MODEL}.name=Qwen3 8B",
        f"models.{MODEL}.architecture=qwen3-8b",
        f"{layout}.tensor_model_parallel_size=1",
        f"{layout}.pipeline_model_parallel_size=1",
        f"platform_optimizations.{platform}.recompute=full",
    ]
    if training.limit_seconds is not None:
        settings += [f"benchmarking.run_timeout_seconds={max(1, round(training.limit_seconds))}"]
    sequences, tokens, micro_batch = (SEQUENCES_PER_DEVICE, SEQUENCE_TOKENS, 2) if machine else (2, 64, 1)
    flags = {
        "--model": MODEL,
        "--engine": "megatron",
        "--parallel": STRATEGY,
        "--precision": precision,
        "--gpus": training.ranks,
        "--steps": training.steps,
        "--global-batch-size": sequences * training.ranks,
        "--micro-batch-size": micro_batch,
        "--sequence-length": tokens,
        "--output-dir": folder,
    }
    words = [str(word) for pair in flags.items() for word in pair] + [
        word for text in ("data=mock", *settings) for word in ("--set", text)
    ]
    return Command(
        argv=(sys.executable, str(ROOT / "benchmark.py"), "--resume", *words),
        environment={"PYTHONPATH": python_environment()["PYTHONPATH"]},
    )
