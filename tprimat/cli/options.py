"""The flags of ./benchmark.py, and what each one sets in the configuration."""

import argparse
from collections.abc import Iterator
from typing import Any

EPILOG = """examples:
  ./benchmark.py                                         both models, minimal_communication
  ./benchmark.py --model llama --parallel balanced --runs 3
  ./benchmark.py --dry-run --platform nvidia             the plan and the exact command, nothing started
  ./benchmark.py --set training.optimizer.learning_rate=1e-4
  ./benchmark.py --model llama --scaling 1,2,4,8         weak scaling: results in output/gpus-1 to gpus-8
  ./benchmark.py --probe gemm,memory                     what the bare operations reach here
  ./benchmark.py --report                                what the results in ./output say, as a page that opens offline

exit status: 0 all runs completed, 1 some run failed (the others' results stay), 2 a mistake in what was asked
"""


def parser() -> argparse.ArgumentParser:
    """The command line of ./benchmark.py."""
    made = argparse.ArgumentParser(
        prog="benchmark.py",
        description="Train Megatron models under a parallelism strategy and measure every step.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = made.add_argument_group("what to run")
    what.add_argument(
        "--model", default="all", metavar="MODEL", help="llama, qwen, another model of config.yaml, or all (default)"
    )
    what.add_argument(
        "--parallel", metavar="STRATEGY", help="a strategy of config.yaml (default: $PARALLEL, minimal_communication)"
    )
    what.add_argument("--runs", type=int, default=1, metavar="N", help="repetitions of each model (default: 1)")
    what.add_argument("--engine", choices=("auto", "megatron", "nemo", "primus"), default="auto", help="default: auto")
    what.add_argument("--platform", choices=("nvidia", "amd", "cpu"), help="default: what this machine is")
    what.add_argument("--gpus", type=int, metavar="N", help="ranks on each node (default: all GPUs here; on a CPU, 8 processes)")
    what.add_argument("--nodes", type=int, metavar="N", help="machines; start the same command on each, or with srun")
    what.add_argument("--size", choices=("full", "tiny"), help="tiny keeps heads and layers (default: tiny on a CPU, else full)")
    what.add_argument("--scaling", metavar="1,2,4,8", help="run on each of these numbers of GPUs, and say what more of them give")
    what.add_argument(
        "--scaling-mode",
        choices=("weak", "strong"),
        default="weak",
        help="weak: every GPU keeps its work, and the batch is that of the largest number (default); strong: one batch, divided",
    )
    workload = made.add_argument_group("workload")
    workload.add_argument("--steps", metavar="N", help="optimizer steps")
    workload.add_argument("--warmup", metavar="N", help="steps left out of the metrics, or auto")
    workload.add_argument("--micro-batch-size", metavar="N", help="sequences, or auto")
    workload.add_argument("--global-batch-size", metavar="N", help="sequences")
    workload.add_argument("--sequence-length", metavar="N", help="tokens")
    workload.add_argument("--precision", choices=("bf16", "fp8", "fp32"))
    workload.add_argument("--data", metavar="DATA", help="mock, or text:PATH (a file or folder)")
    workload.add_argument("--seed", metavar="N")
    how = made.add_argument_group("how")
    how.add_argument("--output-dir", metavar="PATH", help="results and logs (default: $OUTPUT_DIR, ./output)")
    how.add_argument("--config", metavar="FILE", help="instead of config.yaml")
    how.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="any key of the configuration"
    )
    how.add_argument("--resume", action="store_true", help="skip runs whose equal is already in the output folder")
    how.add_argument("--dry-run", action="store_true", help="print the plan and the exact command, start nothing")
    how.add_argument("--quiet", action="store_true", help="no progress, only the summary")
    how.add_argument("--json", action="store_true", help="the summary on stdout as one JSON document")
    other = made.add_argument_group("instead of training")
    other.add_argument("--probe", metavar="KINDS", help="measure bare operations: gemm,attention,collectives,memory,mlp or all")
    other.add_argument("--report", action="store_true", help="one HTML page on all results in --output-dir: report.html there")
    other.add_argument("--archive", metavar="OUT.tar.gz", help="pack all results in --output-dir for others, secrets masked")
    return made


def settings_of(options: argparse.Namespace, platform: str) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Each flag that stands for a key of the configuration: path, text or number, flag."""
    data, hardware = ("training", "data"), ("hardware", "platforms", platform)
    keys: dict[str, tuple[str, ...]] = {
        "gpus": (*hardware, "gpus_per_node"),
        "nodes": (*hardware, "nodes"),
        "steps": ("training", "duration", "max_steps"),
        "warmup": ("benchmarking", "warmup_steps"),
        "micro_batch_size": (*data, "micro_batch_size"),
        "global_batch_size": (*data, "global_batch_size"),
        "sequence_length": (*data, "sequence_length"),
        "precision": ("platform_optimizations", platform, "precision"),
        "data": (*data, "dataset"),
        "seed": ("experiment", "seed"),
    }
    for name, path in keys.items():
        value = getattr(options, name)
        if value is not None:
            yield path, value, f"--{name.replace('_', '-')}"
