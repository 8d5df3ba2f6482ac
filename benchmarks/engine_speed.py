#!/usr/bin/env python3
"""Measure an engine (the embedded one, or --engine nemo) under one layout after the other, in one table.

python3 benchmarks/engine_speed.py --output output/engine-speed
python3 benchmarks/engine_speed.py --only dp_mbs4,tp2_mbs4 --steps 14
python3 benchmarks/engine_speed.py --engine nemo --only dp_mbs2,tp4_mbs4,tp2_pp2_mbs4,qwen_dp_mbs2,qwen_tp2_pp2_mbs4 --steps 12

Layouts that the GPUs here cannot hold are left out, and said to be. Each run leaves its records under --output; the
table is printed and written to engine_speed.json from those records.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tprimat import units  # noqa: E402
from tprimat.launch.cluster import this_machine  # noqa: E402


@dataclass(frozen=True)
class Layout:
    """One row of the table."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    micro_batch: int = 4
    global_batch: int = 64
    sequence: int = 2048
    precision: str = "bf16"
    model: str = "llama"


LAYOUTS = (
    Layout("dp_mbs4"),
    Layout("dp_mbs1", micro_batch=1),
    Layout("tp2_mbs4", tensor=2),
    Layout("tp4_mbs4", tensor=4),
    Layout("tp2_pp2_mbs4", tensor=2, pipeline=2),
    Layout("tp2_pp2_vpp2_mbs4", tensor=2, pipeline=2, virtual=2),
    Layout("dp_s8192_mbs1", micro_batch=1, global_batch=32, sequence=8192),
    Layout("qwen_dp_mbs4", model="qwen"),
    Layout("dp_mbs2", micro_batch=2),
    Layout("qwen_dp_mbs2", model="qwen", micro_batch=2),
    Layout("qwen_tp2_pp2_mbs4", model="qwen", tensor=2, pipeline=2),
)


def command(layout: Layout, options: argparse.Namespace) -> list[str]:
    """./benchmark.py with the layout as a strategy of its own."""
    strategy = f"parallelism.{layout.name}.{layout.model}.nvidia"
    settings = [
        f"{strategy}.tensor_model_parallel_size={layout.tensor}",
        f"{strategy}.pipeline_model_parallel_size={layout.pipeline}",
    ]
    if layout.virtual:
        settings.append(f"{strategy}.virtual_pipeline_model_parallel_size={layout.virtual}")
    settings += options.settings
    flags = {
        "--model": layout.model,
        "--parallel": layout.name,
        "--engine": options.engine,
        "--steps": options.steps,
        "--micro-batch-size": layout.micro_batch,
        "--global-batch-size": layout.global_batch,
        "--sequence-length": layout.sequence,
        "--precision": layout.precision,
        "--output-dir": options.output / layout.name,
    }
    words = [sys.executable, str(ROOT / "benchmark.py"), "--json"]
    words += [str(word) for pair in flags.items() for word in pair]
    return words + [word for setting in settings for word in ("--set", setting)]


def measure(layout: Layout, options: argparse.Namespace) -> dict | None:
    """The run's document, or None with the reason on stderr."""
    done = subprocess.run(command(layout, options), stdout=subprocess.PIPE, text=True, check=False)
    try:
        return json.loads(done.stdout)["runs"][0]
    except (json.JSONDecodeError, IndexError):
        print(f"{layout.name}: no result, exit {done.returncode}", file=sys.stderr)
        return None


def row(name: str, document: dict) -> str:
    """One line of the table."""
    run, metrics = document["run"], document["metrics"]
    layout = f"TP{run['tensor_parallel']} PP{run['pipeline_parallel']} DP{run['data_parallel']}"
    start = f"{name:<20} {layout:<12} MBS{run['micro_batch_sequences']} s{run['sequence_tokens']:<6} {run['matmul_dtype']:<5}"
    if run["outcome"] != "completed" or metrics is None:
        return f"{start} {run['outcome']}: {run['cause']}"
    rate, flops, mfu = (metrics[key] for key in ("tokens_per_second_per_gpu", "model_flops_per_second_per_gpu", "mfu"))
    return (
        f"{start} {units.count(rate['value']):>7} [{units.count(rate['low'])} .. {units.count(rate['high'])}] tokens/s/GPU  "
        f"{units.teraflops(flops['value'])}  MFU {units.percent(mfu['value']) if mfu else units.ABSENT}  "
        f"{units.gibibytes(metrics['peak_memory_bytes'])}  n = {metrics['window']['steps']}"
    )


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/engine-speed"))
    parser.add_argument("--only", help="comma-separated names: " + ", ".join(layout.name for layout in LAYOUTS))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--engine", default="megatron")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    options = parser.parse_args()
    machine = this_machine()
    gpus = machine.gpus_per_node if machine and machine.gpus_per_node else 0
    wanted = options.only.split(",") if options.only else [layout.name for layout in LAYOUTS]
    lines, documents = [], {}
    for layout in (layout for layout in LAYOUTS if layout.name in wanted):
        if gpus % (layout.tensor * layout.pipeline) or not gpus:
            lines.append(
                f"{layout.name:<20} left out: {layout.tensor * layout.pipeline} ranks hold one replica, {gpus} GPUs here"
            )
            continue
        document = measure(layout, options)
        if document:
            documents[layout.name] = document
            lines.append(row(layout.name, document))
            print(lines[-1], file=sys.stderr, flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "engine_speed.json").write_text(json.dumps(documents, indent=2) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
