#!/usr/bin/env python3
"""Measure the cost of BenchmarkCallback: train with it and without it, in turn, in one process.

python3 benchmarks/callback_cost.py --output output/callback-cost.json

Both variants are timed the same way, by host timestamps at the end of each step; waiting for the gradient norm on the host keeps
them in step with the device. A shallow model and few tokens make short steps, so that a cost of microseconds is visible.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shallow import write_shallow_config  # noqa: E402

from tprimat.megatron import bootstrap  # noqa: E402

bootstrap.offer_wgrad_extension()
bootstrap.redirect_to_cpu()

import torch  # noqa: E402

from tprimat.config.load import Setting, read_config  # noqa: E402
from tprimat.megatron.module import MegatronModule, MegatronStrategy  # noqa: E402
from tprimat.megatron.training import resolve  # noqa: E402
from tprimat.plan.build import PlanRequest, build_plan  # noqa: E402
from tprimat.train.callback import BenchmarkCallback  # noqa: E402
from tprimat.train.compat import lightning, quieten  # noqa: E402


class StepEnds(lightning.Callback):
    """Record the host time at the end of each step."""

    def __init__(self):
        self.times = []

    def on_train_batch_end(self, *_):
        """Run after all other callbacks."""
        self.times.append(time.perf_counter())

    def seconds(self, warmup):
        """Return the time of each step after the warm-up."""
        ends = self.times[warmup:]
        return [after - before for before, after in itertools.pairwise(ends)]


def plan_for(folder, options):
    """Build a plan for one rank."""
    on_gpu = torch.cuda.is_available()
    platform = "nvidia" if on_gpu else "cpu"
    write_shallow_config(folder / "config.yaml", options.layers)
    settings = {
        f"hardware.platforms.{platform}.gpus_per_node": 1,
        "training.duration.max_steps": options.steps,
        "training.data.micro_batch_size": 1,
        "training.data.global_batch_size": options.global_batch_size,
    }
    overlay = [Setting(tuple(key.split(".")), value, "callback_cost") for key, value in settings.items()]
    size = "full" if on_gpu else "tiny"
    loaded = read_config(folder / "config.yaml", size=size, settings=overlay, environment={})
    request = PlanRequest(
        model="llama",
        strategy="minimal_communication",
        platform=platform,
        size=size,
        engine="megatron",
        engine_reason="callback_cost",
        gpus_found=1,
        run_id="callback-cost",
        run_directory=str(folder),
        output_directory=str(folder),
    )
    return build_plan(loaded, request)


def train_once(plan, folder, recorded):
    """Train once and return the step times."""
    on_gpu = torch.cuda.is_available()
    ends = StepEnds()
    callbacks = [BenchmarkCallback(folder), ends] if recorded else [ends]
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        strategy=MegatronStrategy(plan, process_group_backend="nccl" if on_gpu else "gloo"),
        max_steps=plan.steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    module = MegatronModule(plan, resolve(plan, torch.device("cuda" if on_gpu else "cpu")))
    trainer.fit(module)
    del trainer, module
    gc.collect()  # the model and its optimizer refer to each other
    torch.cuda.empty_cache()
    return ends.seconds(warmup=plan.steps // 4)


def main():
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/callback-cost.json"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=1)
    options = parser.parse_args()
    quieten()
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"})
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        plan = plan_for(Path(temporary), options)
        rounds = {True: [], False: []}
        for number in range(2 * options.rounds):
            recorded = number % 2 == 1
            rounds[recorded].append(train_once(plan, Path(temporary) / f"round-{number}", recorded))
    medians = {name: [statistics.median(steps) for steps in rounds[on]] for name, on in (("without", False), ("with", True))}
    cost = statistics.median(medians["with"]) - statistics.median(medians["without"])
    document = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "layers": options.layers,
        "tokens_per_step": plan.workload.tokens_per_step,
        "steps_per_round": options.steps,
        "median_step_seconds": medians,
        "cost_seconds_per_step": cost,
        "step_seconds": {"without": rounds[False], "with": rounds[True]},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n")
    for name, values in medians.items():
        print(f"{name:<8} {'  '.join(f'{value * 1e3:.3f} ms' for value in values)}")
    print(f"cost     {cost * 1e3:+.3f} ms a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
