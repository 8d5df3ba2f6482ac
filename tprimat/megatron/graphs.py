"""The passes of a micro-batch launched as one CUDA graph, so that the GPU does not wait for the host.

The first steps run as usual. Then a step is recorded, as a graph of all kernels of a micro-batch, forward and backward; from then
on the host launches each micro-batch with one call. The first micro-batch of a step differs from the others (it gathers updated
weights, and its gradients overwrite), and so does the last (it averages gradients over the replicas): each has a graph of its
own. All graphs share memory, because almost nothing outlives a micro-batch: the loss is copied, and weights in 8 bits, which the
first graph converts, stay referenced until all are recorded.

A pipeline stage has a graph for each pass, which Megatron's schedule launches between its messages. Several micro-batches are
between their passes at once; each has a slot, with memory and graphs of its own. All micro-batches of a slot are alike: weights
are gathered, and converted to 8 bits, before the step, and gradients are cleared before it and averaged after it.

A graph repeats the recorded kernels at the recorded addresses: only the tokens change, and are copied to where it reads them.
Autograd adds a weight's gradient in the stream in which the gradient buffers were made, so they are made, and all passes run, in
the stream that is recorded.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states
from torch import Tensor

from tprimat.megatron.fp8 import free_weights
from tprimat.records.evidence import STEPS_WITHOUT_GRAPHS

STEPS_BEFORE = STEPS_WITHOUT_GRAPHS - 1
"""Steps that run as usual: the first compiles, and the second is the first in which Megatron overlaps its reductions."""


class MicroBatch(NamedTuple):
    """Where a micro-batch stands in its step."""

    first: bool
    last: bool


Passes = Callable[[Tensor, MicroBatch], Tensor]
"""(tokens, place) -> the loss, after forward and backward pass."""


class CudaRecorder:
    """Records in a stream of its own, into memory that all recordings of a slot share."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._memory: dict[int, Any] = defaultdict(torch.cuda.graph_pool_handle)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Make the stream the current one: it waits for the one before, which waits for it afterwards."""
        before = torch.cuda.current_stream()
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            yield
        before.wait_stream(self.stream)

    def record(self, work: Callable[[], Tensor], slot: int = 0) -> tuple[Callable[[], None], Tensor]:
        """Return what repeats the work, and the tensor that holds its result afterwards. The work itself does not run."""
        # Other threads, such as NCCL's, may call CUDA meanwhile: capture_error_mode.
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)  # Megatron forks it around dropout, also where nothing is dropped
        too_large: list[torch.OutOfMemoryError] = []
        try:
            with torch.cuda.graph(graph, pool=self._memory[slot], stream=self.stream, capture_error_mode="thread_local"):
                try:
                    result = work()
                except torch.OutOfMemoryError as error:
                    too_large.append(error)
                    raise
        except RuntimeError:  # the end of a recording that failed raises an error of its own
            if too_large:
                raise too_large[0] from None
            raise
        return graph.replay, result


class StepGraphs:
    """Runs the micro-batches of each step, from the third step on as graphs: `passes` runs both passes of one."""

    def __init__(self, passes: Passes, recorder: CudaRecorder) -> None:
        self._passes = passes
        self._recorder = recorder
        self._graphs: dict[MicroBatch, tuple[Callable[[], None], Tensor]] = {}
        self._tokens: Tensor | None = None
        self._steps = 0
        self.recorded = False

    def forget(self) -> None:
        """Drop the graphs. NCCL waits at its end for all that hold its kernels: a run would not end."""
        self._graphs.clear()

    def run(self) -> AbstractContextManager[object]:
        """Return the context for passes, and for making what they add gradients to."""
        return self._recorder.run()

    def step(self, batch: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], bool]:
        """Run all micro-batches of a step, all of one shape, on the host or the device.

        Returns the loss of each, and whether Python ran any of them instead of repeating an earlier step.
        """
        self._steps += 1
        losses, launched_by_python = [], False
        if self._steps == STEPS_BEFORE + 1:
            free_weights()  # the graphs convert them into memory of their own
        for number, tokens in enumerate(batch):
            place = MicroBatch(number == 0, number == len(batch) - 1)
            if self._tokens is None:
                self._tokens = torch.empty_like(tokens, device=device)
            self._tokens.copy_(tokens, non_blocking=True)
            if self._steps <= STEPS_BEFORE:
                losses.append(self._passes(self._tokens, place))
                launched_by_python = True
                continue
            if place not in self._graphs:
                self._graphs[place] = self._recorder.record(lambda place=place: self._passes(self._tokens, place))  # type: ignore[misc]
                self.recorded = launched_by_python = True
            replay, loss = self._graphs[place]
            replay()
            losses.append(loss.clone())
        return losses, launched_by_python


@dataclass(kw_only=True)
class Slot:
    """What the graphs of one micro-batch at a time read and write, at addresses that stay."""

    tokens: Tensor
    received: Tensor | None
    """From the stage before."""
    sent: Tensor
    """To the next stage; the last stage's losses."""
    gradient: Tensor
    """With respect to `sent`."""
    launches: list[Callable[[], None]] = field(default_factory=list)
    """Of the forward and the backward pass."""


class StageGraphs:
    """Runs the passes of a pipeline stage for Megatron's schedule, from the third step on as graphs.

    `forward_pass` takes tokens and what the stage before sent, None at the first stage. Each recorded pass runs in the context
    `alone`, in which no replica waits for another. At most `in_flight` micro-batches are between their passes.
    """

    def __init__(
        self,
        forward_pass: Callable[[Tensor, Tensor | None], Tensor],
        alone: Callable[[], AbstractContextManager[None]],
        recorder: CudaRecorder,
        in_flight: int,
    ) -> None:
        self._forward_pass, self._alone, self._recorder = forward_pass, alone, recorder
        self._in_flight = in_flight
        self._slots: dict[int, Slot] = {}
        self._steps = self._micro_batch = 0

    @property
    def recorded(self) -> bool:
        """Whether graphs launch the passes of this step."""
        return self._steps > STEPS_BEFORE

    def forget(self) -> None:
        """Drop the graphs: see StepGraphs."""
        for slot in self._slots.values():
            slot.launches.clear()
        self._slots.clear()

    def run(self) -> AbstractContextManager[object]:
        """Return the context for passes, and for making what they add gradients to."""
        return self._recorder.run()

    def begin_step(self) -> None:
        """Begin a step, the third one by recording."""
        self._steps, self._micro_batch = self._steps + 1, 0
        if self._steps == STEPS_BEFORE + 1:
            with self._alone():
                pass  # tensor ranks are then where every recorded pass leaves them
            for number, slot in self._slots.items():
                self._record(slot, number)

    def _record(self, slot: Slot, number: int) -> None:
        done = torch.zeros(())

        def forward() -> Tensor:
            with self._alone():
                slot.sent = self._forward_pass(slot.tokens, slot.received)
            return done

        def backward() -> Tensor:
            if slot.received is not None:
                slot.received.grad = None
            with self._alone():
                torch.autograd.backward(slot.sent, slot.gradient)
            return done

        slot.launches = [self._recorder.record(work, number)[0] for work in (forward, backward)]

    def forward(self, tokens: Tensor, received: Tensor | None, device: torch.device) -> Tensor:
        """Run the forward pass of the next micro-batch; autograd runs the backward pass."""
        number = self._micro_batch % self._in_flight
        self._micro_batch += 1
        if self.recorded:
            slot = self._slots[number]
            slot.tokens.copy_(tokens, non_blocking=True)
            return _Launch.apply(torch.zeros((), requires_grad=True) if received is None else received, slot)  # type: ignore[no-any-return, no-untyped-call]
        tokens = tokens.to(device, non_blocking=True)
        sent = self._forward_pass(tokens, received)
        if number not in self._slots:
            kept = None if received is None else torch.empty_like(received).requires_grad_()
            self._slots[number] = Slot(tokens=tokens.clone(), received=kept, sent=sent.detach(), gradient=torch.empty_like(sent))
        return sent


class _Launch(torch.autograd.Function):
    """The graphs of a slot as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        if slot.received is not None:
            slot.received.copy_(received)
        slot.launches[0]()
        return slot.sent.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        slot: Slot = ctx.slot
        slot.gradient.copy_(gradient)
        slot.launches[1]()
        return None if slot.received is None else slot.received.grad, None
