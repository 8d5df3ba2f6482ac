"""Measure every GPU against its neighbours, under torchrun with one rank per GPU, on any number of nodes.

All ranks multiply and copy at the same time, as in training, then the ranks of each node, and all ranks, reduce together. The
first rank prints one JSON document; runner/health.py judges it. python -m tprimat.probe.health
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import distributed

from tprimat.hardware.gpus import visible_gpus
from tprimat.hardware.health import gpu_errors, xid_errors, xid_lines
from tprimat.probe.case import Bench
from tprimat.probe.collectives import FIXED, gather, process_group

MARK = "tprimat health: "
"""Begins the line with the document."""


def node_errors() -> tuple[str, ...] | None:
    """Return what the driver and the kernel's log report of this node's GPUs; None where neither can be asked."""
    gpus, lines = visible_gpus(os.environ), xid_lines()
    try:
        errors = gpu_errors(gpus).errors
    except LookupError:
        if not lines:
            return None
        errors = []
    return (*errors, *xid_errors(lines or (), gpus)[0])


def examine(bench: Bench) -> dict[str, Any]:
    """Measure this rank, whose GPU has a number among those of its node. All ranks must call it.

    A product of square matrices in bf16, fp32 on a CPU; a copy, read and written; the bus bandwidth of an all-reduce over the
    ranks of its node, as nccl-tests define it, and over all ranks, None for a single rank; and, from the first rank of each node
    that can be asked, what is reported of all its GPUs.
    """
    device, small = bench.device, bench.device.type == "cpu"
    rank, host = distributed.get_rank(), socket.gethostname()
    hosts = gather(host)
    # Every rank must take part in the making of every group, in the same order.
    members = {name: [number for number, other in enumerate(hosts) if other == name] for name in dict.fromkeys(hosts)}
    groups = {name: distributed.new_group(ranks) for name, ranks in members.items()}

    def seconds(call: Callable[[], object], repetitions: int) -> float:
        distributed.barrier()
        effort = replace(FIXED, warmup=repetitions // 3, repetitions=repetitions, flush=False)
        return median(bench.stopwatch.measure(call, effort))

    def reduced(ranks: int, group: distributed.ProcessGroup | None) -> float | None:
        if ranks == 1:
            distributed.barrier()  # waits for the others all the same
            return None
        once = seconds(lambda: distributed.all_reduce(buffer, group=group), 15)
        return 2 * (ranks - 1) / ranks * buffer.numel() * buffer.element_size() / once

    size, repetitions = (256, 9) if small else (8192, 150)
    matrix = torch.ones(size, size, device=device, dtype=torch.float32 if small else torch.bfloat16)
    result = torch.empty_like(matrix)
    product = seconds(lambda: torch.mm(matrix, matrix, out=result), repetitions)
    source = torch.ones((1 << 20) if small else (1 << 30), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = seconds(lambda: target.copy_(source), repetitions)
    buffer = torch.ones((1 << 18) if small else (1 << 26), device=device)
    return {
        "rank": rank,
        "host": host,
        "gpu": members[host].index(rank),
        "product_flops": 2 * size**3 / product,
        "copy_bytes_per_second": 2 * source.numel() / copied,
        "node_reduce_bytes_per_second": reduced(len(members[host]), groups[host]),
        "all_reduce_bytes_per_second": reduced(len(hosts), None),
        "errors": node_errors() if members[host][0] == rank else None,
    }


def main() -> None:
    """Measure, and print what all ranks measured."""
    with process_group(None, None) as bench:
        measured = gather(examine(bench))
        if distributed.get_rank() == 0:
            sys.stdout.write(MARK + json.dumps(measured) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
