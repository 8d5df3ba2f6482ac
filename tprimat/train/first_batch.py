"""The first micro-batch that a model over Megatron-Core gets, and how its layers treat it."""

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor

from tprimat.records.schema import Evidence
from tprimat.train.expert_loads import watch_routers
from tprimat.train.layer_watch import LayerWatch, before_first_call
from tprimat.train.observed import (
    ObservedBatch,
    common_evidence,
    dtype_name,
    layers_in_bf16,
    name_of_tokens,
    scaling_and_attention,
    te_matmul_dtype,
    te_modules,
)


class FirstBatchHook:
    """Observes the first micro-batch that a model gets, and how its layers treat it.

    Only the first pipeline stage, and so rank 0, gets tokens.
    """

    def __init__(self) -> None:
        self.seen: ObservedBatch | None = None
        self.layers: LayerWatch
        self.models: list[Any] = []
        """Megatron's model of each chunk on this rank, once attached."""
        self.watches_routers = False
        """Whether the loads of experts are known after each step."""

    def attach(self, chunks: Sequence[Any]) -> None:
        """Hook into Megatron's own model of each chunk, inside the wrappers for precision and gradients."""
        self.models = [module for chunk in chunks for module in chunk.modules() if isinstance(module, GPTModel)]
        before_first_call(self.models[0], self._observe)
        self.layers = LayerWatch([list(chunk.decoder.layers) for chunk in self.models])
        config = self.models[0].config
        # A layer with hooks cannot be captured as a CUDA graph.
        self.watches_routers = config.num_moe_experts is not None and getattr(config, "cuda_graph_impl", "none") == "none"
        for model in self.models if self.watches_routers else ():
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

    def evidence(self, optimizer: Any, *, fp8_asked: bool, **own: Any) -> Evidence:
        """Return evidence of what runs, with further facts. Every rank must call it: parameters are summed over all."""
        first, config = next(self.models[0].parameters()), self.models[0].config
        wide = layers_in_bf16(config)
        kept = [layer for model in self.models for layer in model.decoder.layers if layer.layer_number in wide]
        fused = te_modules(self.models, without=kept)
        dtype = te_matmul_dtype(fused, first.dtype, fp8_asked=fp8_asked and bool(fused))
        scaling, attention = scaling_and_attention(fused) if dtype == "fp8" else (None, None)
        inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
        return common_evidence(
            self.models,
            config,
            self.seen,
            self.layers,
            parameter_dtype=dtype_name(first.dtype),
            matmul_dtype=dtype,
            attention_dtype=attention,
            layers_in_bf16=len(wide) if dtype == "fp8" else None,
            fp8_scaling=scaling,
            gradient_dtype=dtype_name(first.main_grad.dtype),
            attention="Transformer Engine" if fused else "Megatron-Core's local attention",
            optimizer=f"{type(inner).__name__} over {type(inner.optimizer).__name__}",
            **own,
        )

    def running_options(self, replicas: Any) -> dict[str, Any]:
        """Return what changes speed or memory, under Megatron-Core's names, from the built model and its chunks' `ddp_config`."""
        config = self.models[0].config
        return {
            "cross_entropy_fusion_impl": config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else None,
            "grad_reduce_in_fp32": replicas.grad_reduce_in_fp32,
            "overlap_grad_reduce": replicas.overlap_grad_reduce,
            "overlap_param_gather": replicas.overlap_param_gather,
            "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
            "tp_comm_overlap": config.tp_comm_overlap,
            "cuda_graph_impl": config.cuda_graph_impl,
            "first_last_layers_bf16": bool(layers_in_bf16(config)),
            "moe_token_dispatcher_type": config.moe_token_dispatcher_type if config.num_moe_experts else None,
            **({"fp8_recipe": config.fp8_recipe} if config.fp8 else {}),
        }
