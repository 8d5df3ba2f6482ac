"""The first micro-batch that a model over Megatron-Core gets, and how its layers treat it."""

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor

from tprimat.train.expert_loads import watch_routers
from tprimat.train.layer_watch import LayerWatch, before_first_call
from tprimat.train.observed import ObservedBatch, name_of_tokens


class FirstBatchHook:
    """Observes the first micro-batch that a model gets, and how its layers treat it.

    Only the first pipeline stage, and so rank 0, gets tokens.
    """

    def __init__(self) -> None:
        self.seen: ObservedBatch | None = None
        self.layers: LayerWatch
        self.models: list[Any] = []
        """Megatron's model of each chunk on this rank, once attached."""

    def attach(self, chunks: Sequence[Any]) -> None:
        """Hook into Megatron's own model of each chunk, inside the wrappers for precision and gradients."""
        self.models = [module for chunk in chunks for module in chunk.modules() if isinstance(module, GPTModel)]
        before_first_call(self.models[0], self._observe)
        self.layers = LayerWatch([list(chunk.decoder.layers) for chunk in self.models])
        for model in self.models:
            watch_routers(model)

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, Tensor):
            (rows, part), ranks = tokens.shape, parallel_state.get_context_parallel_world_size()
            sequences = rows * int(get_num_microbatches()) * parallel_state.get_data_parallel_world_size()
            self.seen = ObservedBatch(
                micro_batch_sequences=rows,
                global_batch_sequences=sequences,
                sequence_tokens=part * ranks,
                tokens_per_step=sequences * part * ranks,
                first_sequence=name_of_tokens(tokens[0]) if ranks == 1 else None,
            )
