"""Stands in on a CPU for what only GPUs have.

For CUDA graphs: Python runs the passes again where a GPU would repeat recorded kernels. For memory that tensor ranks read from
each other: collectives before and after whole products.
"""

import weakref
from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state

dropped_in_time = []
"""For each graph that was dropped, whether the groups of ranks were still there."""


class RepeatingRecorder:
    def run(self):
        return nullcontext()

    def record(self, work, slot=0):
        result = torch.empty(())
        weakref.finalize(result, lambda: dropped_in_time.append(parallel_state.model_parallel_is_initialized()))

        def replay():
            with torch.enable_grad():
                result.copy_(work())

        return replay, result


class CollectiveExchange:
    def __init__(self, group):
        self.group = group

    def gather_and_multiply(self, shard, multiply, out):
        full = shard.new_empty((out.shape[0], shard.shape[1]))
        dist.all_gather_into_tensor(full.view(torch.uint8), shard.view(torch.uint8), group=self.group)
        multiply(full, out)
        return full

    def multiply_and_reduce_scatter(self, rows, multiply, columns, dtype):
        product = torch.empty((rows.shape[0], columns), dtype=dtype)
        multiply(rows, product)
        out = product.new_empty((rows.shape[0] // self.group.size(), columns))
        dist.reduce_scatter_tensor(out, product, group=self.group)
        return out

    def start_reduce_scatter(self, *operands):
        done = self.multiply_and_reduce_scatter(*operands)
        return lambda: done

    def begin_anew(self):
        pass
