"""Write torch's flight recorder to a file when the launcher asks for it, while the main thread hangs in a collective.

torch records the collectives that each rank has entered and left. In a hang, the records of all ranks together show which rank
is missing from which collective; `launch/hang.py` reads them. SIGUSR2 asks. It is blocked in every thread, and one thread
waits for it: a Python signal handler would have to wait until the main thread comes back from the collective.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

FOLDER = "flight-recorder"
"""In the run's folder; one file per rank."""
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
    """Return the name of each process group of this rank and the ranks in it, which torch's recorder knows under NCCL alone."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        configs = module._get_all_pg_configs()  # type: ignore[union-attr]
        return {str(group["pg_name"]): [int(rank) for rank in group["ranks"]] for group in configs}
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return {}
