#!/usr/bin/env python3
"""Measure what each switch of the embedded engine brings on one GPU: a run with it off after a run with all on, again and again.

python3 benchmarks/switches.py --output output/switches
python3 benchmarks/switches.py --only compiled_regions,fp8 --layers 12 --steps 14

The model is Llama 3.1 8B with fewer layers. Each run leaves its records in a folder named after what was off; the runs
with everything on come between them, so that a drift of the machine shows.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shallow import write_shallow_config  # noqa: E402

OPTIONS = "platform_optimizations.nvidia.engine_options"
SWITCHES = (
    "compiled_regions",
    "streamed_cross_entropy",
    "accumulate_weight_gradients",
    "cudnn_attention",
    "fused_adam",
    "load_ahead",
)


def flags_of(name: str) -> list[str]:
    """What one run of the series is told beside what all are told."""
    if name == "fp8":
        return ["--precision", "fp8"]
    return [] if name.startswith("on") else ["--set", f"{OPTIONS}.{name}=false"]


def main() -> int:
    """Run the series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/switches"))
    parser.add_argument("--only", default=",".join((*SWITCHES, "fp8")), help="comma-separated, in this order")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=16)
    options = parser.parse_args()
    config = options.output / "config.yaml"
    write_shallow_config(config, options.layers)
    names = ["on-1"]
    for number, name in enumerate(options.only.split(","), start=1):
        names += [name, *([f"on-{number // 3 + 1}"] if number % 3 == 0 else [])]
    failed = 0
    for name in names:
        flags = {
            "--config": config,
            "--model": "llama",
            "--gpus": 1,
            "--steps": options.steps,
            "--micro-batch-size": options.micro_batch_size,
            "--global-batch-size": options.global_batch_size,
            "--output-dir": options.output / name,
        }
        words = [sys.executable, str(ROOT / "benchmark.py"), "--quiet", *(str(word) for pair in flags.items() for word in pair)]
        print(f"== {name}", flush=True)
        failed += subprocess.run([*words, *flags_of(name)], check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
