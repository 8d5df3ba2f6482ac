"""Measure every GPU against its neighbours, under torchrun with one rank per GPU, on any number of nodes.

All ranks multiply and copy at the same time, as in training, then the ranks of each node, and all ranks, reduce together. The
first rank prints one JSON document; runner/health.py judges it. python -m tprimat.probe.health
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import distributed

from tprimat.hardware.gpus import visible_gpus
from tprimat.hardware.health import gpu_errors, xid_errors, xid_lines
from tprimat.probe.collectives import gather, process_group

MARK = "tprimat health: "
"""Begins the line with the document."""
ROUNDS = 3
"""The best of them counts: what disturbs one round is not the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """What one rank measured."""

    rank: int
    host: str
    gpu: int
    """Among those of its node."""
    product_flops: float
    """FLOP/s of a product of square matrices in bf16; fp32 on a CPU."""
    copy_bytes_per_second: float
    """Read and written."""
    node_reduce_bytes_per_second: float | None
    """Bus bandwidth of an all-reduce over the ranks of its node, as nccl-tests define it; None for a single rank."""
    all_reduce_bytes_per_second: float | None
    """The same over all ranks."""
    errors: tuple[str, ...] | None = None
    """What the driver and the kernel's log report of all GPUs of its node; from the first rank of each node that can be asked."""


def node_errors() -> tuple[str, ...] | None:
    """Return what the driver and the kernel's log report of this node's GPUs; None where neither can be asked."""
    gpus, lines = visible_gpus(os.environ), xid_lines()
    try:
        found = gpu_errors(gpus).errors
    except LookupError:
        if not lines:
            return None
        found = []
    return (*found, *xid_errors(lines or (), gpus)[0])


def best_seconds(call: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Return the seconds of one call, in the best round."""
    found = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        distributed.barrier()
        synchronize(device)
        began = time.perf_counter()
        for _ in range(repetitions):
            call()
        synchronize(device)
        found.append((time.perf_counter() - began) / repetitions)
    return min(found[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def examine(device: torch.device) -> RankHealth:
    """Measure this rank. All ranks must call it."""
    small = device.type == "cpu"
    size, repetitions = (256, 3) if small else (8192, 50)
    matrix = torch.ones(size, size, device=device, dtype=torch.float32 if small else torch.bfloat16)
    result = torch.empty_like(matrix)
    product = best_seconds(lambda: torch.mm(matrix, matrix, out=result), device, repetitions)
    source = torch.ones((1 << 20) if small else (1 << 30), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = best_seconds(lambda: target.copy_(source), device, repetitions)
    world, rank = distributed.get_world_size(), distributed.get_rank()
    host = socket.gethostname()
    hosts = gather(host)
    buffer = torch.ones((1 << 18) if small else (1 << 26), device=device)
    # Every rank must take part in the making of every group, in the same order.
    members = {name: [number for number, other in enumerate(hosts) if other == name] for name in dict.fromkeys(hosts)}
    groups = {name: distributed.new_group(ranks) for name, ranks in members.items()}
    return RankHealth(
        rank=rank,
        host=host,
        gpu=members[host].index(rank),
        product_flops=2 * size**3 / product,
        copy_bytes_per_second=2 * source.numel() / copied,
        node_reduce_bytes_per_second=reduced(buffer, device, len(members[host]), groups[host]),
        all_reduce_bytes_per_second=reduced(buffer, device, world, None),
        errors=node_errors() if members[host][0] == rank else None,
    )


def reduced(buffer: torch.Tensor, device: torch.device, ranks: int, group: distributed.ProcessGroup | None) -> float | None:
    """Return the bus bandwidth of an all-reduce over a group; None for one rank, which still waits for the others."""
    seconds = best_seconds(lambda: distributed.all_reduce(buffer, group=group) if ranks > 1 else None, device, 5)
    return None if ranks == 1 else 2 * (ranks - 1) / ranks * buffer.numel() * buffer.element_size() / seconds


def main() -> None:
    """Measure, and print what all ranks found."""
    with process_group(None, None) as bench:
        found = gather(examine(bench.device))
        if distributed.get_rank() == 0:
            sys.stdout.write(MARK + json.dumps([asdict(one) for one in found]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
