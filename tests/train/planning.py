"""Plans for tests, made by the code that makes the user's plans, and a way to train several in one start of torchrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from changes import replace
from plans import DEGREES

from tprimat.config.load import Setting, read_config
from tprimat.plan.build import PlanRequest
from tprimat.plan.schema import write_plan
from tprimat.records.store import RunDirectory
from tprimat.runner.session import plan_run

ROOT = Path(__file__).parent.parent.parent
SHALLOW = 4
LIGHTLY = "from tprimat.train.startup import import_torchmetrics; import_torchmetrics()\n"
"""Begins a program that imports Lightning: without the large packages that torchmetrics would import, as a rank."""

STEPS, SEQUENCES, TOKENS = 3, 4, 32


def split_settings(model: str, ranks: int, split: dict, micro_batch: int = 1) -> dict:
    """The keys of config.yaml of a few steps of few short sequences on so many ranks, and of how they are split and trained.

    Args:
        split: DEGREES, recomputation, options of the engine, and whole keys.
    """
    layout, platform = f"parallelism.minimal_communication.{model}.cpu", "platform_optimizations.cpu"
    settings = {
        "training.duration.max_steps": STEPS,
        "training.data.global_batch_size": SEQUENCES,
        "training.data.sequence_length": TOKENS,
        "training.optimizer.learning_rate": 1e-3,
        "hardware.platforms.cpu.gpus_per_node": ranks,
        f"{layout}.micro_batch_size": micro_batch,
        f"{layout}.expert_model_parallel_size": 1,
    }
    for key, value in split.items():
        option = f"{platform}.{key}" if key.startswith("recompute") else f"{platform}.engine_options.{key}"
        place = f"{layout}.{DEGREES.get(key, key)}" if key in {*DEGREES, "sequence_parallel"} else option
        settings[key if "." in key else place] = value
    return settings


def make_plan(
    folder: Path,
    model: str,
    settings: dict,
    *,
    strategy: str = "minimal_communication",
    layers: int | None = SHALLOW,
    engine: str = "megatron",
    platform: str = "cpu",
):
    """A plan of the tiny model on a CPU; `settings` are dotted keys of config.yaml."""
    overlay = [Setting(tuple(key.split(".")), value, "test") for key, value in settings.items()]
    loaded = read_config(size="tiny", settings=overlay, environment={})
    request = PlanRequest(
        model=model,
        strategy=strategy,
        platform=platform,
        size="tiny",
        engine=engine,
        engine_reason="test",
        gpus_found=None,
        run_id=folder.name,
        run_directory=str(folder),
        output_directory=str(folder),
    )
    plan = plan_run(loaded, request)
    return replace(plan, shape=replace(plan.workload.shape, layers=layers)) if layers else plan


def train_together(plans: list, *, timeout: float = 500) -> list[tuple]:
    """Train plans in one start of train_plans.py, each on ranks of its own; returns (run, steps) of each."""
    directories = [RunDirectory(Path(plan.run_directory)) for plan in plans]
    for plan, directory in zip(plans, directories, strict=True):
        write_plan(directory.plan_file, plan)
    command = [sys.executable, str(Path(__file__).parent / "train_plans.py")]
    command += [str(directory.plan_file) for directory in directories]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
    assert process.returncode == 0, out[-3000:] + err[-5000:]
    return [(directory.read_run(), directory.read_steps()) for directory in directories]
