"""The flags of ./benchmark.py, and what each one sets in the configuration."""

import argparse

from tprimat.cli.common import add_probes
from tprimat.engines import AUTO, ENGINE_NAMES

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


def at_least_one(text: str) -> int:
    """A count, for argparse."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line of ./benchmark.py."""
    made = argparse.ArgumentParser(
        prog="benchmark.py",
        description="Train Megatron models under a parallelism strategy and measure every step.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _what_to_run(made.add_argument_group("what to run"))
    _workload(made.add_argument_group("workload"))
    _how(made.add_argument_group("how"))
    _instead(made.add_argument_group("instead of training"))
    return made


def _what_to_run(group: argparse._ArgumentGroup) -> None:
    """Model, strategy, engine and ranks."""
    group.add_argument(
        "--model", default="all", metavar="MODEL", help="llama, qwen, another model of config.yaml, or all (default)"
    )
    group.add_argument(
        "--parallel", metavar="STRATEGY", help="a strategy of config.yaml (default: $PARALLEL, minimal_communication)"
    )
    group.add_argument("--runs", type=int, default=1, metavar="N", help="repetitions of each model (default: 1)")
    group.add_argument("--engine", choices=(AUTO, *ENGINE_NAMES), default=AUTO, help="default: auto")
    group.add_argument("--platform", choices=("nvidia", "amd", "cpu"), help="default: what this machine is")
    group.add_argument("--gpus", type=int, metavar="N", help="ranks on each node (default: all GPUs here; on a CPU, 8 processes)")
    group.add_argument("--nodes", type=int, metavar="N", help="machines; start the same command on each, or with srun")
    group.add_argument("--size", choices=("full", "tiny"), help="tiny keeps heads and layers (default: tiny on a CPU, else full)")
    group.add_argument(
        "--scaling", metavar="1,2,4,8", help="run on each of these numbers of GPUs, and say what more of them give"
    )
    group.add_argument(
        "--scaling-mode",
        choices=("weak", "strong"),
        default="weak",
        help="weak: every GPU keeps its work, and the batch is that of the largest number (default); strong: one batch, divided",
    )


def _workload(group: argparse._ArgumentGroup) -> None:
    """What a step trains on."""
    group.add_argument("--steps", metavar="N", help="optimizer steps")
    group.add_argument("--warmup", metavar="N", help="steps left out of the metrics, or auto")
    group.add_argument("--micro-batch-size", metavar="N", help="sequences, or auto: the largest that fits")
    group.add_argument("--global-batch-size", metavar="N", help="sequences")
    group.add_argument("--sequence-length", metavar="N", help="tokens")
    group.add_argument("--precision", choices=("bf16", "fp8", "fp32"))
    group.add_argument("--data", metavar="DATA", help="mock, or text:PATH (a file or folder)")
    group.add_argument("--seed", metavar="N")


def _how(group: argparse._ArgumentGroup) -> None:
    """Files, settings and output."""
    group.add_argument("--output-dir", metavar="PATH", help="results and logs (default: $OUTPUT_DIR, ./output)")
    group.add_argument("--config", metavar="FILE", help="instead of config.yaml")
    add_probes(group, "in the output folder")
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="any key of the configuration"
    )
    group.add_argument("--resume", action="store_true", help="skip runs whose equal is already in the output folder")
    group.add_argument("--dry-run", action="store_true", help="print the plan and the exact command, start nothing")
    group.add_argument("--quiet", action="store_true", help="no progress, only the summary")
    group.add_argument("--json", action="store_true", help="the summary on stdout as one JSON document")


def _instead(group: argparse._ArgumentGroup) -> None:
    """Other work on the same folder or machine."""
    group.add_argument("--probe", metavar="KINDS", help="measure bare operations: gemm,attention,collectives,memory,mlp or all")
    group.add_argument("--report", action="store_true", help="one HTML page on all results in --output-dir: report.html there")
    group.add_argument("--archive", metavar="OUT.tar.gz", help="pack all results in --output-dir for others, secrets masked")
