#!/usr/bin/env python3
"""Compare ways to overlap tensor-parallel communication with matrix products: plain NCCL, torch's fused operators, and ours.

torchrun --nproc_per_node 4 benchmarks/exchange_speed.py --output output/exchange.json
torchrun --nproc_per_node 4 benchmarks/exchange_speed.py --graphs    without the host's part: each way's calls are one CUDA graph

The shapes are those of a layer of Llama 3.1 8B. The implementations run in turn, round after round, and every result is compared
with NCCL's. Needs GPUs with peer-to-peer access.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tprimat.core.models import model_shape  # noqa: E402
from tprimat.megatron import compat  # noqa: E402
from tprimat.megatron.tp_overlap import Exchange, Multiply, exchange_of  # noqa: E402
from tprimat.records.environment import software_versions  # noqa: E402

Implementation = Callable[[Tensor, Tensor], Tensor]


def products(hidden: int, ffn: int, joint: int, ranks: int) -> dict[str, tuple[str, int, int]]:
    """Return kind, inner and outer size of each exchanged product of a layer on one rank, forward and backward."""
    return {
        "qkv": ("gather", hidden, joint // ranks),
        "attention output": ("scatter", hidden // ranks, hidden),
        "gate and up": ("gather", hidden, 2 * ffn // ranks),
        "down": ("scatter", ffn // ranks, hidden),
        "down, backward": ("gather", hidden, ffn // ranks),
        "gate and up, backward": ("scatter", 2 * ffn // ranks, hidden),
        "attention output, backward": ("gather", hidden, hidden // ranks),
        "qkv, backward": ("scatter", joint // ranks, hidden),
    }


def implementations(kind: str, group: dist.ProcessGroup) -> dict[str, Implementation]:
    """Return the implementations of a product by name."""
    ours, name = exchange_of(group), group.group_name

    def gathered(rows: Tensor, matrix: Tensor) -> Tensor:
        full = rows.new_empty((group.size() * rows.shape[0], rows.shape[1]))
        dist.all_gather_into_tensor(full, rows, group=group)
        return full @ matrix

    def scattered(rows: Tensor, matrix: Tensor) -> Tensor:
        product = rows @ matrix
        out = product.new_empty((product.shape[0] // group.size(), product.shape[1]))
        dist.reduce_scatter_tensor(out, product, group=group)
        return out

    def into(matrix: Tensor) -> Multiply:
        return lambda rows, out: torch.mm(rows, matrix, out=out)

    def gathered_in_pieces(rows: Tensor, matrix: Tensor) -> Tensor:
        out = rows.new_empty((group.size() * rows.shape[0], matrix.shape[1]))
        ours.gather_and_multiply(rows, into(matrix), out)
        return out

    if kind == "gather":
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return {
            "nccl": gathered,
            "torch": lambda rows, matrix: fused(rows, [matrix], 0, name)[1][0],
            "ours": gathered_in_pieces,
        }
    scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return {
        "nccl": scattered,
        "torch": lambda rows, matrix: scatter(rows, matrix, "sum", 0, name),
        "ours": lambda rows, matrix: ours.multiply_and_reduce_scatter(rows, into(matrix), matrix.shape[1], rows.dtype),
        "ours, behind": lambda rows, matrix: ours.start_reduce_scatter(rows, into(matrix), matrix.shape[1], rows.dtype)(),
    }


def repeated(function: Implementation, rows: Tensor, matrix: Tensor, calls: int, exchange: Exchange) -> None:
    """Call a function so often, from the same state of the exchange each time."""
    exchange.begin_anew()
    for _ in range(calls):
        function(rows, matrix)


def recorded(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of some work. NCCL's threads may call CUDA meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def milliseconds(work: Callable[[], None], calls: int) -> float:
    """Return the mean time of a call in work that makes several without a pause."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def measure(kind: str, rows: Tensor, matrix: Tensor, options: argparse.Namespace) -> list[dict]:
    """Return each implementation's times by round, and its largest difference from NCCL's result relative to its maximum."""
    group = dist.group.WORLD
    exchange, functions = exchange_of(group), implementations(kind, group)
    if options.graphs:
        del functions["torch"]
    times: dict[str, list[float]] = {name: [] for name in functions}
    worst = dict.fromkeys(functions, 0.0)
    works: dict[str, Callable[[], None]] = {}
    for name, function in functions.items():
        works[name] = partial(repeated, function, rows, matrix, options.calls, exchange)
        works[name]()  # the first call shares memory and compiles kernels
        if options.graphs:
            works[name] = recorded(works[name]).replay
    for _ in range(options.rounds):
        rows.normal_()
        expected = functions["nccl"](rows, matrix).float()
        for name, function in functions.items():
            times[name].append(milliseconds(works[name], options.calls))
            exchange.begin_anew()
            difference = (function(rows, matrix).float() - expected).abs().max() / expected.abs().max()
            dist.all_reduce(difference, op=dist.ReduceOp.MAX)
            worst[name] = max(worst[name], float(difference))
    return [
        {"way": name, "milliseconds": times[name], "largest_difference": worst[name], "median": statistics.median(times[name])}
        for name in functions
    ]


def main() -> int:
    """Measure, print and write the results; return 1 if a result differs by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/exchange.json"))
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--graphs", action="store_true", help="each way's calls are one CUDA graph (not torch's)")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if compat.symmetric_memory() is None:
        parser.error("this torch has no symmetric memory")
    compat.enable_symmetric_memory(dist.group.WORLD.group_name)
    ranks, shape = dist.get_world_size(), model_shape("llama-3.1-8b")
    joint = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    rows = []
    for name, (kind, inner, outer) in products(shape.hidden, shape.ffn, joint, ranks).items():
        length = options.tokens // ranks if kind == "gather" else options.tokens
        left, matrix = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((length, inner), (inner, outer)))
        for result in measure(kind, left, matrix, options):
            rows.append({"product": name, "kind": kind, "rows": options.tokens, "inner": inner, "outer": outer, **result})
            if dist.get_rank() == 0:
                print(f"{name:28} {result['way']:14} {result['median']:.3f} ms  {result['largest_difference']:.1e}", flush=True)
    if dist.get_rank() == 0:
        machine = {"accelerator": torch.cuda.get_device_name(), "ranks": ranks, "calls": options.calls, "graphs": options.graphs}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**machine, "software": software_versions(), "products": rows}, indent=1) + "\n")
    dist.destroy_process_group()
    return 1 if any(row["largest_difference"] > 0.02 for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
