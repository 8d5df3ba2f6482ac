#!/usr/bin/env python3
"""Measure the gain of each switch of the embedded engine: runs with one switch off, between runs with all switches on.

python3 benchmarks/switches.py --output output/switches
python3 benchmarks/switches.py --only compiled_regions,fp8 --layers 12 --steps 14
python3 benchmarks/switches.py --split replicas --output output/switches

The model is Llama 3.1 8B with fewer layers, on one GPU or split over two. Each run writes its records to a folder named after the
switch that was off. Runs with everything on come between them, so that a drift of the machine shows.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shallow import write_shallow_config  # noqa: E402

OPTIONS = "platform_optimizations.nvidia.engine_options"
STRATEGY = "parallelism.{name}.llama.nvidia.{degree}_model_parallel_size={number}"


@dataclass(frozen=True, kw_only=True)
class Series:
    """A layout, and the switches that matter there."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    switches: tuple[str, ...]


SERIES = {
    "one": Series(
        gpus=1,
        switches=(
            "compiled_regions",
            "streamed_cross_entropy",
            "accumulate_weight_gradients",
            "cudnn_attention",
            "tuned_products",
            "compiled_adam",
            "fused_adam",
            "fp8",
        ),
    ),
    "replicas": Series(gpus=2, switches=("overlap_grad_reduce", "overlap_param_gather", "distributed_optimizer")),
    "tensor": Series(gpus=2, tensor=2, switches=("overlap_tensor_parallel",)),
    "stages": Series(gpus=2, pipeline=2, switches=("balanced_stages",)),
}


ONLY_WITHOUT = {"fused_adam": ("compiled_adam",)}
"""Switch -> switches that make it do nothing: it is compared with the run that has them off."""


def flags_of(name: str) -> list[str]:
    """Return the flags of one run, in addition to those of all runs."""
    if name == "fp8":
        return ["--precision", "fp8"]
    off = () if name.startswith("on") else (name, *ONLY_WITHOUT.get(name, ()))
    return [word for switch in off for word in ("--set", f"{OPTIONS}.{switch}=false")]


def main() -> int:
    """Run a series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/switches"))
    parser.add_argument("--split", default="one", choices=SERIES, help="over which GPUs (one)")
    parser.add_argument("--only", help="comma-separated, in this order")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=16)
    options = parser.parse_args()
    series = SERIES[options.split]
    config = options.output / "config.yaml"
    write_shallow_config(config, options.layers)
    names = ["on-1"]
    degrees = {"tensor": series.tensor, "pipeline": series.pipeline}
    layout = [STRATEGY.format(name=options.split, degree=degree, number=number) for degree, number in degrees.items()]
    for number, name in enumerate(options.only.split(",") if options.only else series.switches, start=1):
        names += [name, *([f"on-{number // 3 + 1}"] if number % 3 == 0 else [])]
    failed = 0
    for name in names:
        flags = {
            "--config": config,
            "--model": "llama",
            "--gpus": series.gpus,
            "--parallel": options.split,
            "--steps": options.steps,
            "--micro-batch-size": options.micro_batch_size,
            "--global-batch-size": options.global_batch_size,
            "--output-dir": options.output / options.split / name,
        }
        words = [sys.executable, str(ROOT / "benchmark.py"), *(str(word) for pair in flags.items() for word in pair)]
        words += [word for setting in layout for word in ("--set", setting)]
        print(f"== {options.split}, {name}", flush=True)
        failed += subprocess.run([*words, *flags_of(name)], check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
