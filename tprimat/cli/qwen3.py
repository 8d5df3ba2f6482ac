"""Full training of Qwen3 8B on the embedded engine, for the accelerator suite: ./benchmark.py, once for each dtype."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tprimat.engines.base import Command
from tprimat.records.schema import Machine
from tprimat.runner.ranks import environment

MODEL = "qwen3-8b"
STRATEGY = "minimal_communication"
PLATFORM_NAMES = {"cuda": "nvidia", "rocm": "amd", "cpu": "cpu"}
PRECISIONS = ("bf16", "fp8")
SEQUENCES_OF_A_DEVICE, SEQUENCE_TOKENS = 14, 8192
"""The published runs' batch; in micro-batches of 2."""

LIMIT_FLAG = "--time-budget"
"""Of the suite: what whoever wants a longer run has to raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the user's flags make of it."""

    machine: Machine | None
    """None: no GPU is here, and a tiny Qwen3 trains on processes."""
    ranks: int
    steps: int
    seconds: float | None
    """A run is stopped after this."""


def command_of(precision: str, folder: Path, training: Training) -> Command:
    """The exact process of one run; its records go into the folder, and one that counts is not made again."""
    machine = training.machine
    platform = PLATFORM_NAMES[machine.platform if machine else "cpu"]
    layout = f"parallelism.{STRATEGY}.{MODEL}.{platform}"
    settings = [
        f"models.{MODEL}.name=Qwen3 8B",
        f"models.{MODEL}.architecture=qwen3-8b",
        f"{layout}.tensor_model_parallel_size=1",
        f"{layout}.pipeline_model_parallel_size=1",
        f"platform_optimizations.{platform}.recompute=full",
    ]
    if training.seconds is not None:
        limit = f"benchmarking.run_timeout_seconds={max(1, round(training.seconds))}"
        settings += [limit, f"benchmarking.run_timeout_flag={LIMIT_FLAG}"]
    sequences, tokens, micro = (SEQUENCES_OF_A_DEVICE, SEQUENCE_TOKENS, 2) if machine else (2, 64, 1)
    flags = {
        "--model": MODEL,
        "--engine": "megatron",
        "--parallel": STRATEGY,
        "--precision": precision,
        "--gpus": training.ranks,
        "--steps": training.steps,
        "--global-batch-size": sequences * training.ranks,
        "--micro-batch-size": micro,
        "--sequence-length": tokens,
        "--data": "mock",
        "--output-dir": folder,
    }
    words = [str(word) for pair in flags.items() for word in pair] + [word for text in settings for word in ("--set", text)]
    return Command(
        argv=(sys.executable, "-m", "tprimat.cli.benchmark", "--resume", *words),
        environment={"PYTHONPATH": environment(1)["PYTHONPATH"]},
    )
