"""python -m torchtitan.train: the lines of torchtitan 0.2.2 or 0.3.0 for the workload of its flags, on every rank.

With --module and --config as 0.3.0 wants them, that function must say the rest.

FAKE_TITAN_BATCH    the global batch that it reports instead
FAKE_TITAN_TENSOR   the tensor-parallel degree that it reports instead
FAKE_TITAN_DTYPE    the type of its products that it reports instead
FAKE_TITAN_FAILS    a line to fail with after its first step
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

START = "[titan] 2026-01-01 10:00:00,123 - root - INFO - "
REQUIRED = {
    "model.name": str,
    "model.flavor": str,
    "model.hf_assets_path": str,
    "training.dataset": str,
    "training.mixed_precision_param": str,
    "training.steps": int,
    "training.seq_len": int,
    "training.local_batch_size": int,
    "training.global_batch_size": int,
    "parallelism.tensor_parallel_degree": int,
}
OPTIONAL = {
    "job.dump_folder": str,
    "training.max_norm": float,
    "parallelism.context_parallel_degree": int,
    "activation_checkpoint.mode": str,
    "optimizer.lr": float,
    "optimizer.beta1": float,
    "optimizer.beta2": float,
    "optimizer.eps": float,
    "optimizer.weight_decay": float,
    "lr_scheduler.warmup_steps": int,
    "lr_scheduler.decay_type": str,
    "lr_scheduler.min_lr_factor": float,
    "metrics.log_freq": int,
    "debug.seed": int,
    "model.converters": str,
}
"""Fields of JobConfig (torchtitan 0.2.2, torchtitan/config/job_config.py) with their types."""
SWITCHES = ("compile.enable", "job.print_config")


def log(text):
    print(START + text, flush=True)


GONE = ("model.", "job.", "training.dataset", "activation_checkpoint.", "optimizer.")
"""Fields that 0.3.0 has under no such name."""


def arguments():
    by_a_module = "--module" in sys.argv
    fields = REQUIRED | OPTIONAL
    if by_a_module:
        fields = {name: kind for name, kind in fields.items() if not name.startswith(GONE)}
        fields |= {"module": str, "config": str, "dump_folder": str, "hf_assets_path": str}
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in fields.items():
        parser.add_argument(f"--{name}", type=kind, required=name in REQUIRED)
    for name in ("compile.enable", "debug.print_config") if by_a_module else SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    given = vars(parser.parse_args())
    if by_a_module:
        config = getattr(importlib.import_module(given["module"]), given["config"])()
        assert config.dataloader.dataset == "c4_test"
        log(f"model {config.model_spec} optimizer {config.optimizer} recomputes {config.activation_checkpoint}")
        given["model.hf_assets_path"] = given["hf_assets_path"]
    return given


def describe(given, batch, degrees):
    """Everything before the first step."""
    dtype = os.environ.get("FAKE_TITAN_DTYPE", given["training.mixed_precision_param"])
    mesh = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
    log("Running with configs: {")
    print(f'    "mixed_precision_param": "{dtype}",', flush=True)
    log(f"Building device mesh with parallelism: pp=1, dp_replicate=1, {mesh}, ep=1, etp=1")
    log("CPU capacity: a processor with 8.00GiB memory")
    local, steps = given["training.local_batch_size"], given["training.steps"]
    accumulation = batch // (local * degrees["dp_shard"])
    log(
        f"Trainer is initialized with local batch size {local}, global batch size {batch}, gradient accumulation steps "
        f"{accumulation}, sequence length {given['training.seq_len']}, total steps {steps} (warmup 2)"
    )


def main():
    given = arguments()
    for path in ("tests/assets/c4_test/data.json", f"{given['model.hf_assets_path']}/tokenizer.json"):
        assert Path(path).is_file(), path
    world, context = int(os.environ["WORLD_SIZE"]), given["parallelism.context_parallel_degree"] or 1
    tensor = int(os.environ.get("FAKE_TITAN_TENSOR", given["parallelism.tensor_parallel_degree"]))
    batch = int(os.environ.get("FAKE_TITAN_BATCH", given["training.global_batch_size"]))
    describe(given, batch, {"dp_shard": world // (tensor * context), "cp": context, "tp": tensor})
    tokens = batch * given["training.seq_len"]
    for step in range(1, given["training.steps"] + 1):
        started = time.perf_counter()
        time.sleep(0.05)
        rate = tokens / ((time.perf_counter() - started) * world)
        log(
            f"step: {step:2}  loss: {12 - step:8.5f}  grad_norm:  1.0000  memory:  1.50GiB(18.75%)  tps: {round(rate):,}  "
            "tflops: 1.00  mfu: 1.00%"
        )
        if "FAKE_TITAN_FAILS" in os.environ:
            if os.environ["LOCAL_RANK"] != "0":
                time.sleep(60)  # torchrun ends this rank: the console shows local rank 0 only
            sys.exit(os.environ["FAKE_TITAN_FAILS"])
    log("Training completed")


if __name__ == "__main__":
    main()
