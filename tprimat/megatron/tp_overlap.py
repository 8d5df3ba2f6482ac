"""Overlap of a product with the exchange between tensor ranks, through memory that the GPUs of a machine read from each other.

Copies use the copy engines, and so take nothing from the matrix units. One barrier per piece is enough (torch's own
torch.ops.symm_mem.fused_* take three), in a stream of its own: a rank writes to one half of a workspace while the others may
still read the other half, and to the same half again two exchanges later. By then it has passed the barrier of the exchange
between, which the others enter only after they have read the first. The stream that multiplies has waited for that barrier only
because it has waited for that exchange's sum: a sum must be finished before the next exchange begins.
tests/train/test_tp_overlap.py runs this code on simulated streams, in random orders that the waits allow.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from tprimat.megatron import compat
from tprimat.megatron.compat import compiled

HALVES = 2
ALIGNMENT_BYTES = 512


def can_overlap(ranks: int, gpus: int) -> bool:
    """Whether the `gpus` of a machine read each other's memory in each tensor group.

    Not with ROCm: its system-wide signals depend on how memory was allocated, and this is untested there. The `ranks` of a group
    are neighbors.
    """
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    if gpus % ranks or gpus > torch.cuda.device_count():
        return False
    pairs = [(one, other) for one in range(gpus) for other in range(gpus) if one != other and one // ranks == other // ranks]
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)


Multiply = Callable[[Tensor, Tensor], object]
"""Multiplies some rows into given memory, (n, in) and (n, out)."""
Finish = Callable[[], Tensor]
"""Waits for a sum whose parts still travel, and returns it. To call before the group's next exchange."""


@cache
def exchange_of(group: dist.ProcessGroup) -> "Exchange":
    """Return the exchange of a group. All ranks of the group must call this."""
    return Exchange(group)


class Workspace:
    """Two halves of memory that every rank of a group reads, for one kind of exchange. The constructor is a collective call."""

    def __init__(self, group_name: str, bytes_of_half: int) -> None:
        self.bytes_of_half = bytes_of_half
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = compat.symmetric_memory().empty(HALVES * bytes_of_half, dtype=torch.uint8, device=device)
        self.handle = compat.symmetric_memory().rendezvous(self._memory, group_name)
        self.turn = 0
        self._views: dict[tuple[int, torch.Size, torch.dtype], list[Tensor]] = {}

    def next_half(self, shape: torch.Size, dtype: torch.dtype) -> list[Tensor]:
        """Return the next half, as a tensor of each rank."""
        self.turn = (self.turn + 1) % HALVES
        key = (self.turn, shape, dtype)
        if key not in self._views:
            offset = self.turn * self.bytes_of_half // dtype.itemsize
            ranks = range(self.handle.world_size)
            self._views[key] = [self.handle.get_buffer(rank, shape, dtype, storage_offset=offset) for rank in ranks]
        return self._views[key]


class Exchange:
    """Gathered and reduce-scattered products over the ranks of a group, which must all call them in the same order.

    Copies from the other ranks' memory run in a stream of their own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_name = group.group_name
        self.rank, self.ranks = group.rank(), group.size()
        self.side = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._arrived = [torch.cuda.Event() for _ in range(self.ranks - 1)]  # type: ignore[no-untyped-call]
        self._workspaces: dict[str, Workspace] = {}
        self._outgrown: list[Workspace] = []

    def gather_and_multiply(self, shard: Tensor, multiply: Multiply, out: Tensor) -> Tensor:
        """Return all ranks' rows, (ranks x n, in), and write their product to `out`, (ranks x n, out).

        One rank's rows are multiplied while the next one's travel, and so on around the ring. `shard` is contiguous.
        """
        workspace = self._workspace("gather", shard.nbytes)
        shared = workspace.next_half(shard.shape, shard.dtype)
        full = shard.new_empty((self.ranks * shard.shape[0], shard.shape[1]))
        pieces, products = full.chunk(self.ranks), out.chunk(self.ranks)
        others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            shared[self.rank].copy_(shard)
            workspace.handle.barrier(channel=0)
            for other, arrived in zip(others, self._arrived, strict=True):
                pieces[other].copy_(shared[other])
                arrived.record(self.side)
            pieces[self.rank].copy_(shard)
        multiply(shard, products[self.rank])
        for other, arrived in zip(others, self._arrived, strict=True):
            main.wait_event(arrived)
            multiply(pieces[other], products[other])
        main.wait_stream(self.side)
        return full

    def multiply_and_reduce_scatter(self, rows: Tensor, multiply: Multiply, columns: int, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows of the sum over ranks of the product: (ranks x n, in of this rank) -> (n, columns).

        A piece travels to the rank that needs it while the next is multiplied. `rows` are contiguous.
        """
        workspace, shared, received = self._scattering(rows, columns, dtype)
        pieces = rows.chunk(self.ranks)
        main = torch.cuda.current_stream()
        for step in range(1, self.ranks):
            target, source = (self.rank + step) % self.ranks, (self.rank - step) % self.ranks
            multiply(pieces[target], shared[self.rank][target])
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                workspace.handle.barrier(channel=0)
                received[step - 1].copy_(shared[source][self.rank])
        own = torch.empty_like(received[0])
        multiply(pieces[self.rank], own)
        return self._sum(own, received)

    def start_reduce_scatter(self, rows: Tensor, multiply: Multiply, columns: int, dtype: torch.dtype) -> Finish:
        """Begin the same as one product, whose parts travel while the caller continues."""
        workspace, shared, received = self._scattering(rows, columns, dtype)
        multiply(rows, shared[self.rank].flatten(0, 1))
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            workspace.handle.barrier(channel=0)
            for step in range(1, self.ranks):
                received[step - 1].copy_(shared[(self.rank - step) % self.ranks][self.rank])
        return partial(self._sum, shared[self.rank][self.rank], received)

    def _sum(self, own: Tensor, received: Tensor) -> Tensor:
        """Wait for the other ranks' parts, and add them up in fp32."""
        torch.cuda.current_stream().wait_stream(self.side)
        return compiled(_total)(own, received)  # type: ignore[no-any-return]

    def begin_anew(self) -> None:
        """Forget the exchanges so far, which must be over: what follows may be repeated, or follow something else (graphs.py).

        After one more barrier nobody reads either half, so that any may be written next.
        """
        for workspace in self._workspaces.values():
            workspace.handle.barrier(channel=0)
            workspace.turn = 0

    def _scattering(self, rows: Tensor, columns: int, dtype: torch.dtype) -> tuple[Workspace, list[Tensor], Tensor]:
        """Return the workspace, its next half as a tensor (ranks, n, columns) of each rank, and space for the others' parts."""
        shape = torch.Size((self.ranks, rows.shape[0] // self.ranks, columns))
        workspace = self._workspace("scatter", shape.numel() * dtype.itemsize)
        return workspace, workspace.next_half(shape, dtype), rows.new_empty((self.ranks - 1, *shape[1:]), dtype=dtype)

    def _workspace(self, kind: str, bytes_needed: int) -> Workspace:
        """Return one that is large enough. Sizes agree on all ranks, so that all of them create a new one in the same call."""
        known = self._workspaces.get(kind)
        if known is None or known.bytes_of_half < bytes_needed:
            if known is not None:
                self._outgrown.append(known)  # others may still read it
            aligned = -(-bytes_needed // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            known = self._workspaces[kind] = Workspace(self.group_name, aligned)
        return known


def _total(own: Tensor, received: Tensor) -> Tensor:
    return (own.float() + received.float().sum(dim=0)).to(own.dtype)
