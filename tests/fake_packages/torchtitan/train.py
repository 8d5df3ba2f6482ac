"""python -m torchtitan.train: the lines of torchtitan 0.2.2 for the workload that its flags ask for, on every rank.

FAKE_TITAN_BATCH   the global batch that it says it trains on instead
FAKE_TITAN_FAILS   a line to fail with after its first step
"""

import argparse
import os
import sys
import time
from pathlib import Path

START = "[titan] 2026-01-01 10:00:00,123 - root - INFO - "


def say(text):
    print(START + text, flush=True)


def main():
    parser = argparse.ArgumentParser()
    for name in ("model.name", "model.flavor", "model.hf_assets_path", "training.dataset", "training.mixed_precision_param"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("steps", "seq_len", "local_batch_size", "global_batch_size"):
        parser.add_argument(f"--training.{name}", type=int, required=True)
    parser.add_argument("--parallelism.tensor_parallel_degree", type=int, required=True)
    for name in ("activation_checkpoint.mode", "lr_scheduler.warmup_steps", "metrics.log_freq"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--compile.enable", action="store_true")
    parser.add_argument("--job.print_config", action="store_true")
    asked = vars(parser.parse_args())
    for path in ("tests/assets/c4_test/data.json", f"{asked['model.hf_assets_path']}/tokenizer.json"):
        assert Path(path).is_file(), path
    world, tensor = int(os.environ["WORLD_SIZE"]), asked["parallelism.tensor_parallel_degree"]
    batch = int(os.environ.get("FAKE_TITAN_BATCH", asked["training.global_batch_size"]))
    tokens, steps = batch * asked["training.seq_len"], asked["training.steps"]
    say("Running with configs: {")
    print(f'    "mixed_precision_param": "{asked["training.mixed_precision_param"]}",', flush=True)
    say(
        f"Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard={world // tensor}, cp=1, tp={tensor}, ep=1, etp=1"
    )
    say("CPU capacity: a processor with 8.00GiB memory")
    local = asked["training.local_batch_size"]
    say(
        f"Trainer is initialized with local batch size {local}, global batch size {batch}, gradient accumulation steps "
        f"{batch // (local * (world // tensor))}, sequence length {asked['training.seq_len']}, total steps {steps} (warmup 2)"
    )
    for step in range(1, steps + 1):
        begun = time.perf_counter()
        time.sleep(0.05)
        rate = tokens / ((time.perf_counter() - begun) * world)
        say(
            f"step: {step:2}  loss: {12 - step:8.5f}  grad_norm:  1.0000  memory:  1.50GiB(18.75%)  tps: {round(rate):,}  "
            "tflops: 1.00  mfu: 1.00%"
        )
        if "FAKE_TITAN_FAILS" in os.environ:
            sys.exit(os.environ["FAKE_TITAN_FAILS"])
    say("Training completed")


if __name__ == "__main__":
    main()
