"""The process that torchrun starts on every rank: python -m tprimat.train.worker --plan PLAN."""

import argparse
import faulthandler
import os
import signal
import sys
import warnings
from importlib import import_module
from pathlib import Path

from tprimat.errors import UserError
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.train import startup

TRAINERS = {"megatron": "tprimat.megatron.run", "nemo": "tprimat.nemo.run"}
"""Modules whose `train(plan)` trains a plan on one rank."""


def main(arguments: list[str] | None = None) -> int:
    """Train the plan that `--plan PATH` names.

    Returns:
        0 when training is done, 2 for a mistake that the user can correct.
    """
    startup.reached("rank_started")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json, as ./benchmark.py wrote it")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a hung rank, for a launcher without py-spy
    try:
        train(read_plan(options.plan))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def train(plan: RunPlan) -> None:
    """Hand a plan to its engine's trainer."""
    quieten()
    startup.pause_garbage_collection()
    # Megatron's overlap of communication and computation relies on one hardware queue (Megatron-LM's own requirement), which
    # is set when the GPU is opened.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    startup.transformer_engine_is_usable()  # before anything imports megatron.core
    import_module(TRAINERS[plan.engine]).train(plan)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


IRRELEVANT = (
    ".*Apex.* not installed",
    ".*full scope is deprecated",
    ".*does not have many workers",
    ".*attribute of a Tensor that is not a leaf",
    ".*using the device under current context",
)
"""Warnings of libraries on which no user of a benchmark can act."""


def quieten() -> None:
    """Keep the training log readable: our warnings, and errors, stay."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for message in IRRELEVANT:
        warnings.filterwarnings("ignore", message=message)


if __name__ == "__main__":
    sys.exit(main())
