"""GPUs' streams on a CPU: every rank's code runs first and only queues its work, which is then done in a random order.

The order is any that streams, events and barriers allow. Memory that a rank lets go is overwritten, and given to the next who
asks, in the order of the stream that asked for it first, as torch's allocator does. So a read that comes too late, a write
that comes too early and a wait that is missing all show in the numbers, and ranks that wait for each other end in an error.
"""

import random
import weakref
from collections import deque
from contextlib import contextmanager
from math import prod

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FACTORIES = {torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format}


class Machine:
    """The GPUs, and what `torch.cuda` and torch's symmetric memory answer to the rank whose code runs."""

    def __init__(self, ranks):
        self.ranks, self.rank = ranks, 0
        self.memory = {}
        self.shared, self.handles = [], []
        self.made = [0] * ranks
        self.mains = [Stream(self, rank=rank) for rank in range(ranks)]
        self.current = list(self.mains)
        self.streams = list(self.mains)

    def allocate(self, shape, dtype):
        """On the rank's current stream."""
        size, stream = prod(shape) * dtype.itemsize, self.current[self.rank]
        let_go = stream.free.setdefault(size, [])
        memory = let_go.pop() if let_go else np.full(size, 255, dtype=np.uint8)

        def free():
            stream.add(lambda: memory.fill(255))
            let_go.append(memory)

        borrowed = memory.view()
        weakref.finalize(borrowed, free).atexit = False
        return self._known(memory, borrowed).view(dtype).view(shape)

    def _known(self, memory, borrowed):
        tensor = torch.from_numpy(borrowed)
        self.memory[tensor.untyped_storage().data_ptr()] = memory
        return tensor

    def tensor(self, values):
        """One that is made on the rank's current stream."""
        out = self.allocate(values.shape, values.dtype)
        target = self.borrow(out)
        self.current[self.rank].add(lambda: target.copy_(values))
        return out

    def borrow(self, value):
        """The same numbers, without keeping their memory."""
        if not isinstance(value, torch.Tensor):
            return value
        memory = torch.from_numpy(self.memory[value.untyped_storage().data_ptr()])
        return memory.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())

    @contextmanager
    def as_rank(self, rank):
        self.rank = rank
        with Queueing(self):
            yield

    def work(self, seed, *, one_queue=False):
        """Do everything that is queued, some streams faster than others; with one_queue, each rank's in the order of its code."""
        choose = random.Random(seed)
        speeds = {stream: choose.choice((1, 30, 1000)) for stream in self.streams}
        while waiting := [stream for stream in self.streams if stream.queue]:
            if one_queue:
                first = {}
                for stream in waiting:
                    first[stream.rank] = min(first.get(stream.rank, stream), stream, key=lambda s: s.queue[0][0])
                waiting = list(first.values())
            ready = [stream for stream in waiting if stream.queue[0][1]()]
            if not ready:
                raise RuntimeError("Every stream waits for another.")
            (stream,) = choose.choices(ready, [speeds[stream] for stream in ready])
            stream.queue.popleft()[2]()
            stream.done += 1

    # What torch.cuda has.

    def current_stream(self):
        return self.current[self.rank]

    def current_device(self):
        return self.rank

    @contextmanager
    def stream(self, stream):
        before, self.current[self.rank] = self.current[self.rank], stream
        yield
        self.current[self.rank] = before

    def Stream(self, priority=0):  # noqa: N802 - torch's name
        self.streams.append(Stream(self, rank=self.rank))
        return self.streams[-1]

    # What torch.distributed._symmetric_memory has.

    def empty(self, size, dtype, device):
        """The ranks' n-th belong together, and are made when the first asks."""
        number = self.made[self.rank]
        if number == len(self.shared):
            blocks = [np.full(size, 255, dtype=np.uint8) for _ in range(self.ranks)]
            self.shared.append([self._known(block, block) for block in blocks])
            self.handles.append([{} for _ in range(self.ranks)])
        assert self.shared[number][0].numel() == size
        return self.shared[number][self.rank]

    def rendezvous(self, memory, name):
        self.made[self.rank] += 1
        return Handle(self, self.made[self.rank] - 1)


class Stream:
    def __init__(self, machine, rank):
        self.machine, self.rank = machine, rank
        self.queue, self.added, self.done, self.free = deque(), 0, 0, {}

    order = 0

    def add(self, work=lambda: None, ready=lambda: True):
        Stream.order += 1
        self.queue.append((Stream.order, ready, work))
        self.added += 1

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event):
        stream, number = event.place
        self.add(ready=lambda: stream.done >= number)


class Event:
    def record(self, stream):
        self.place = stream, stream.added


class Handle:
    def __init__(self, machine, number):
        self.machine, self.rank = machine, machine.rank
        self.blocks, self.arrived = machine.shared[number], machine.handles[number]
        self.world_size = machine.ranks
        self.asked = 0

    def get_buffer(self, rank, shape, dtype, storage_offset):
        return self.blocks[rank].view(dtype)[storage_offset : storage_offset + shape.numel()].view(shape)

    def barrier(self, channel):
        self.asked += 1
        asked, stream = self.asked, self.machine.current_stream()

        def arrive():
            self.arrived[self.rank][channel] = asked

        stream.add(arrive)
        stream.add(ready=lambda: all(rank.get(channel, 0) >= asked for rank in self.arrived))


class Queueing(TorchDispatchMode):
    """Puts what writes memory into the current stream's queue."""

    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FACTORIES:
            like = func(*args, **kwargs)
            return self.machine.allocate(like.shape, like.dtype)
        if func.is_view:
            return func(*args, **kwargs)
        borrowed = [self.machine.borrow(argument) for argument in args]
        stream = self.machine.current_stream()
        if func is torch.ops.aten.copy_.default:
            stream.add(lambda: borrowed[0].copy_(borrowed[1]))
            return args[0]
        if "out" in kwargs:
            target = self.machine.borrow(kwargs["out"])
            stream.add(lambda: func(*borrowed, out=target))
            return kwargs["out"]
        like = func(*args, **kwargs)
        out = self.machine.allocate(like.shape, like.dtype)
        target = self.machine.borrow(out)
        stream.add(lambda: target.copy_(func(*borrowed, **kwargs)))
        return out
