"""The process that torchrun starts on every rank: python -m tprimat.train.worker --plan PLAN."""

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from tprimat.core.errors import WORKER_ERROR, RecordError, UserError
from tprimat.core.rows import DATA, document
from tprimat.plan.graphs import launches_graphs
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.train import startup


def main(arguments: list[str] | None = None) -> int:
    """Train the plan at `--plan PATH`; return 0 when training is done, 2 for a mistake that the user can correct."""
    startup.reached("rank_started")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json, written by ./benchmark.py")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1)  # prints the stack of a hung rank, for a launcher without py-spy
    try:
        plan = read_plan(options.plan)
        answer_requests(Path(plan.run_directory), int(os.environ.get("RANK", "0")))
        trainer_of(plan)(plan)
    except UserError as error:
        print(f"{WORKER_ERROR}{error}", file=sys.stderr)  # noqa: T201
        return 2
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def trainer_of(plan: RunPlan) -> Callable[[RunPlan], None]:
    """Import the plan's trainer, after what must come before; return what trains a plan on this rank."""
    if plan.trainer is None:
        what = f"The plan of run {plan.run_id} names no trainer for the worker to import."
        why = f"The engine {plan.engine} brings its own processes, or an older version of TPrimat wrote the plan."
        raise RecordError(what, where="plan.json: trainer", why=why, fix="./benchmark.py plans and starts the run again")
    quieten()
    startup.pause_garbage_collection()
    # Megatron's overlap of communication and computation relies on one hardware queue (Megatron-LM's own requirement), which
    # is set when the GPU is opened. fully_shard's exchanges start from a stream of their own, and would wait in that queue; the
    # branches of a CUDA graph may. A recipe may want more queues.
    trainer = import_module(plan.trainer)
    if not (plan.engine_options.fully_shard or launches_graphs(plan) or hasattr(trainer, "VARIABLES")):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    train: Callable[[RunPlan], None] = trainer.train
    return train


def quieten() -> None:
    """Keep the training log readable: our own warnings and all errors stay."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for message in document(DATA / "framework_settings.yaml")["irrelevant_warnings"]:
        warnings.filterwarnings("ignore", message=message)


# torch's flight recorder, written to a file when the launcher asks for it, while the main thread hangs in a collective.
#
# In a hang, the records of all ranks show which is missing from which collective; `launch/hang.py` reads them. SIGUSR2 asks. One
# thread waits for it: a Python signal handler would have to wait until the main thread comes back from the collective.

FOLDER = "flight-recorder"
BUFFER_SIZE, ENTRIES = "TORCH_FR_BUFFER_SIZE", "2000"
"""How many collectives torch remembers. Before 2.9 the variable had another name, and torch remembered none by default."""
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""torch has one recorder for NCCL and one for other backends, and each call only where it was built with that recorder."""


def answer_requests(run_directory: Path, rank: int) -> None:
    """Answer each SIGUSR2 with a file. Call it in the main thread, before it starts others and before torch is imported."""
    os.environ.setdefault(BUFFER_SIZE, ENTRIES)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

    def answer() -> None:
        while True:
            signal.sigwait({signal.SIGUSR2})
            write_record(run_directory / FOLDER / f"rank-{rank}.json", rank)

    Thread(target=answer, name="flight recorder", daemon=True).start()


def write_record(path: Path, rank: int) -> None:
    """Write what torch has recorded on this rank; without a word where the disk is full, since the run is about to be stopped."""
    document = {"rank": rank, "taken_ns": time.time_ns(), "groups": groups(), "recorders": recorders()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(document), encoding="utf8")
        unfinished.replace(path)
    except OSError:
        return


def recorders() -> list[dict[str, Any]]:
    """Return the documents of torch's recorders; none before torch is imported, and where torch has none."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    documents = []
    for name in RECORDERS:
        try:
            documents.append(json.loads(getattr(c10d, name)()))
        except (AttributeError, RuntimeError, ValueError):
            continue
    return documents


def groups() -> dict[str, list[int]]:
    """Return the name of each process group of this rank and the ranks in it, which torch's recorder knows only under NCCL."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        configs = module._get_all_pg_configs()  # type: ignore[union-attr]
        return {str(group["pg_name"]): [int(rank) for rank in group["ranks"]] for group in configs}
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
