"""The first micro-batch that a Megatron model gets, and how its layers treat it: observed, whatever was asked for."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor

from tprimat.megatron.watch import LayerWatch
from tprimat.records.evidence import fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatch:
    """The first micro-batch that entered the model on this rank."""

    micro_batch_sequences: int
    sequence_tokens: int
    first_sequence: str | None
    """Name of the tokens of this rank's first sequence; None where context parallelism cuts it."""

    @property
    def global_batch_sequences(self) -> int:
        """With the running schedule's number of micro-batches, over all replicas."""
        replicas: int = parallel_state.get_data_parallel_world_size()
        return self.micro_batch_sequences * int(get_num_microbatches()) * replicas

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.global_batch_sequences * self.sequence_tokens


class FirstBatchHook:
    """Observes the first micro-batch that a model gets, and how its first layer treats it.

    Only the first pipeline stage, and so rank 0, gets tokens.
    """

    def __init__(self) -> None:
        self.seen: FirstBatch | None = None
        self.layer: LayerWatch | None = None
        self.models: list[Any] = []
        """Megatron's model of each chunk on this rank, once attached."""
        self._hook: Any = None

    def attach(self, chunks: list[Any]) -> None:
        """Hook into the model inside the wrappers of each chunk; the first micro-batch removes the hook."""
        self.models = [module for chunk in chunks for module in chunk.modules() if isinstance(module, GPTModel)]
        self._hook = self.models[0].register_forward_pre_hook(self._observe, with_kwargs=True)
        self.layer = LayerWatch([list(chunk.decoder.layers) for chunk in self.models])

    def _observe(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, Tensor):
            rows, length = tokens.shape
            ranks = parallel_state.get_context_parallel_world_size()
            name = fingerprint(tokens[0].to("cpu", torch.int64).numpy().tobytes()) if ranks == 1 else None
            self.seen = FirstBatch(micro_batch_sequences=rows, sequence_tokens=length * ranks, first_sequence=name)
        self._hook.remove()
