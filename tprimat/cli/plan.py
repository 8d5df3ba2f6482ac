"""Predict which layout trains a model fastest on some GPUs, and what fits, in seconds and without a GPU.

tprimat plan --architecture llama-3.1-70b --accelerator "NVIDIA H100 80GB HBM3" --gpus 64
tprimat plan --architecture mixtral-8x7b --accelerator MI300X --gpus 64 --nodes 8 --sequence-length 4096
tprimat plan --architecture llama-3.1-8b --probes output     on this machine, by its own probes
tprimat plan --model qwen --accelerator "H200 SXM" --gpus 8     as config.yaml has it
tprimat plan --architecture llama-3.1-8b --all     every layout

exit status: 0, 1 if nothing fits, 2 the request is invalid
"""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import doing, positive, print_json
from tprimat.engines import ENGINE_NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--architecture", metavar="MODEL", help="the name of one of tprimat models")
    which.add_argument("--model", metavar="NAME", help="a model of config.yaml, with its batch and sequence length")
    parser.add_argument("--accelerator", metavar="NAME", help="a device name, or a row of tprimat models (this machine's)")
    parser.add_argument("--gpus", type=positive, metavar="N", help="total number (this machine's; 8 of another)")
    parser.add_argument("--nodes", type=positive, metavar="N", help="machines (as many as hold 8 GPUs each)")
    parser.add_argument("--global-batch-size", type=positive, metavar="N", help="sequences per step (2 per GPU, at least 128)")
    parser.add_argument("--sequence-length", type=positive, metavar="N", help="tokens (8192, or the model's context)")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="default: bf16")
    parser.add_argument("--engine", choices=ENGINE_NAMES, help="default: megatron; megatron-lm for what it cannot train")
    parser.add_argument(
        "--probes",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="a probes.jsonl of this machine, or its folder, instead of published rates; may be repeated",
    )
    parser.add_argument("--all", action="store_true", help="show every layout, and where memory and time of the fastest go")
    parser.add_argument("--json", action="store_true", help="print all layouts as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where nothing fits."""
    from tprimat.report import plan
    from tprimat.report.tables import screen_of
    from tprimat.runner.planning import LayoutsAsked, answer, configured, configured_name, enough_gpus

    request = LayoutsAsked(
        architecture=options.model or options.architecture,
        accelerator=options.accelerator,
        gpus=options.gpus,
        nodes=options.nodes,
        global_batch=options.global_batch_size,
        sequence_tokens=options.sequence_length,
        precision=options.precision,
        engine=options.engine,
        probes=tuple(options.probes),
    )
    request = configured(request) if options.model else request
    with doing("predicting all layouts ..."):
        found, rates = rated = answer(request)
        missing = not found.fitting and not options.json
        enough = enough_gpus(found.question, rates, any_engine=request.engine is None) if missing else None
    if options.json:
        print_json(plan.document(*rated))
    else:
        name = rated[0].question.work.shape.name
        command = _command_of(options.model or configured_name(name), name)
        print(plan.text(rated, screen_of(sys.stdout), enough, command, whole=options.all))
    return 0 if rated[0].fitting else 1


def _command_of(model: str | None, architecture: str) -> str:
    """Return the command that runs a model of config.yaml; None: one that the command itself describes."""
    if model is not None:
        return f"./benchmark.py --model {model}"
    model = architecture.replace(".", "_")
    row = f"--set models.{model}"
    return f"./benchmark.py --model {model} {row}.name={architecture} {row}.architecture={architecture}"
