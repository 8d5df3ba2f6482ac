"""Stands in for CUDA graphs on a CPU: Python runs the passes again where a GPU would repeat recorded kernels."""

import weakref
from contextlib import nullcontext

import torch
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
