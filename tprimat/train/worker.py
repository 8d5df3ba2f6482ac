"""The process that torchrun starts on every rank: python -m tprimat.train.worker --plan PLAN."""

import argparse
import faulthandler
import os
import signal
import sys
import warnings
from importlib import import_module
from pathlib import Path

from tprimat.core.errors import WORKER_ERROR, RecordError, UserError
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.train import flight_recorder, startup


def main(arguments: list[str] | None = None) -> int:
    """Train the plan at `--plan PATH`.

    Returns:
        0 when training is done, 2 for a mistake that the user can correct.
    """
    startup.reached("rank_started")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json, written by ./benchmark.py")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a hung rank, for a launcher without py-spy
    try:
        plan = read_plan(options.plan)
        flight_recorder.answer_requests(Path(plan.run_directory), int(os.environ.get("RANK", "0")))
        train(plan)
    except UserError as error:
        print(f"{WORKER_ERROR}{error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def train(plan: RunPlan) -> None:
    """Import the plan's trainer and let it train on this rank.

    Raises:
        UserError: the plan names no trainer, or the trainer cannot do what it asks for.
    """
    if plan.trainer is None:
        what = f"The plan of run {plan.run_id} names no trainer for the worker to import."
        why = f"The engine {plan.engine} brings its own processes, or an older version of TPrimat wrote the plan."
        raise RecordError(what, where="plan.json: trainer", why=why, fix="./benchmark.py plans and starts the run again")
    quieten()
    startup.pause_garbage_collection()
    # Megatron's overlap of communication and computation relies on one hardware queue (Megatron-LM's own requirement), which
    # is set when the GPU is opened. fully_shard's exchanges start from a stream of their own, and would wait in that queue; the
    # branches of a CUDA graph may.
    if not (plan.engine_options.fully_shard or plan.engine_options.cuda_graphs):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import_module(plan.trainer).train(plan)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


IRRELEVANT = (
    ".*Apex.* not installed",
    ".*absl.logging is not installed",
    ".*full scope is deprecated",
    ".*does not have many workers",
    ".*attribute of a Tensor that is not a leaf",
    ".*using the device under current context",
)
"""Library warnings that the user of a benchmark cannot act on."""


def quieten() -> None:
    """Keep the training log readable: our own warnings and all errors stay."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for message in IRRELEVANT:
        warnings.filterwarnings("ignore", message=message)


if __name__ == "__main__":
    sys.exit(main())
