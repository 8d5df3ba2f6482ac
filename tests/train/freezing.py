"""Stands in on a CPU for a CUDA graph: what Python decides is frozen, and memory that a graph has freed is lost.

A recording keeps torch's operations with the tensors that they read and write, as a graph keeps kernels and addresses. Nothing
that the recording makes has a value before it is repeated, nothing older changes while it records, and a value that is read on
the host is an error. After each repetition everything that had no owner at the end of the recording becomes NaN: on a GPU another
graph of the pool, or of none, may have its memory by then.
"""

import linecache
import sys
import weakref
from contextlib import nullcontext

import torch
from megatron.core import parallel_state
from repeating import dropped_in_time
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}


def storage(tensor):
    return tensor.untyped_storage()._cdata


def owners(tensor):
    return torch._C._storage_Use_Count(storage(tensor))


def lose(tensor):
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)  # NaN in every dtype of numbers with a point


def of_the_host():
    """Whether the operation is one that a GPU's rank does not have: gloo's copies in wait(), or states of a CPU's generator."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in {"__torch_function__", "inner", "_fn"}:
        frame = frame.f_back
    if "wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return True
    for _ in range(14):
        if frame is None or frame.f_code.co_name in {"forward", "apply", "backward"}:
            return False
        if frame.f_code.co_filename.endswith("tensor_parallel/random.py"):
            return True
        frame = frame.f_back
    return False


class Tape(TorchDispatchMode):
    def __init__(self, pool):
        super().__init__()
        self.pool, self.made, self.operations = pool, [], []

    def keep(self, tensor):
        """An own reference to the memory, so that the tape owns nothing of the tensor itself."""
        alias = torch.ops.aten.alias.default(tensor)
        if storage(alias) in self.pool:
            self.pool[storage(alias)][1] += 1
        return alias

    def record(self, function, arguments, results=()):
        kept = tree_map_only(torch.Tensor, self.keep, (arguments, results))
        self.operations.append((function, *kept))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        arguments, schema = (args, kwargs or {}), function._schema
        if of_the_host():
            return function(*args, **(kwargs or {}))
        assert schema.name not in HOST_READS, f"the host reads a value: {schema.name}"
        if schema.name.startswith("c10d::"):
            self.record(function, arguments)
            args, kwargs = tree_map_only(torch.Tensor, lambda one: one if storage(one) in self.pool else one.clone(), arguments)
            return function(*args, **kwargs)
        if schema.is_mutable or not schema.returns:
            self.record(function, arguments)
            values = {one.name: value for one, value in zip(schema.arguments, args, strict=False)} | arguments[1]
            written = [values.get(one.name) for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
            written = [one for one in tree_leaves(written) if isinstance(one, torch.Tensor)]
            if written and all(storage(one) in self.pool for one in written):
                return function(*args, **arguments[1])
            return (written[0] if len(written) == 1 else tuple(written)) if schema.returns else None
        before = {storage(one) for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)}
        out = function(*args, **arguments[1])
        results = [one if storage(one) not in before else None for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        for one in results:
            if one is not None:
                self.made.append(torch.ops.aten.alias.default(one))
                self.pool[storage(one)] = [self.made[-1], 1]
        if any(one is not None for one in results):  # no view
            self.record(function, arguments, results)
        return out


class FreezingRecorder:
    def __init__(self):
        self.pools = {}

    def run(self):
        return nullcontext()

    def record(self, work, slot=0):
        pool = self.pools.setdefault(slot, {})
        with Tape(pool) as tape:
            result = work()
        other = owners(torch.empty(1)) - 1  # torch's own, such as Python's object
        freed = [tensor for tensor, kept in pool.values() if owners(tensor) - other == kept]
        for tensor in tape.made:
            lose(tensor)
        operations = tape.operations

        @torch.no_grad()
        def replay():
            for function, (args, kwargs), results in operations:
                out = tree_leaves(function(*args, **kwargs))
                for one in out:
                    if isinstance(one, torch.ScriptObject):
                        one.wait()
                for kept, one in zip(results, [one for one in out if isinstance(one, torch.Tensor)], strict=False):
                    if kept is not None:
                        kept.copy_(one)
            for tensor in freed:
                lose(tensor)

        weakref.finalize(replay, lambda: dropped_in_time.append(parallel_state.model_parallel_is_initialized()))
        return replay, result
