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

    def record(self, work):
        result = torch.empty(())
        weakref.finalize(result, lambda: dropped_in_time.append(parallel_state.model_parallel_is_initialized()))

        def replay():
            with torch.enable_grad():
                result.copy_(work())

        return replay, result


class CollectiveExchange:
    def __init__(self, group):
        self.group = group

    def gather_and_multiply(self, shard, matrix):
        full = shard.new_empty((self.group.size() * shard.shape[0], shard.shape[1]))
        dist.all_gather_into_tensor(full, shard, group=self.group)
        return full, full @ matrix

    def multiply_and_reduce_scatter(self, rows, matrix):
        product = rows @ matrix
        out = product.new_empty((product.shape[0] // self.group.size(), product.shape[1]))
        dist.reduce_scatter_tensor(out, product, group=self.group)
        return out

    def start_reduce_scatter(self, rows, matrix):
        done = self.multiply_and_reduce_scatter(rows, matrix)
        return lambda: done

    def begin_anew(self):
        pass
