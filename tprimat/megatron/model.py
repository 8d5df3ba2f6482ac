"""RunPlan -> Megatron-Core's GPTModel: the exact architecture, split as the plan says, with the same weights in every layout."""

import zlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from tprimat.errors import LaunchError
from tprimat.facts.flops import attention_matrices, feed_forward_matrices
from tprimat.facts.models import ModelShape, RopeScaling, padded_vocabulary
from tprimat.megatron import transformer_engine
from tprimat.megatron.attention import Rotation
from tprimat.megatron.fp8 import Fp8Products
from tprimat.megatron.layers import block_spec, defer_residual_add
from tprimat.megatron.linear import ColumnLinear, NativeProducts, RowLinear, linear_types
from tprimat.megatron.loss import ChunkedLossModel
from tprimat.megatron.options import ResolvedOptions
from tprimat.megatron.wgrad import use_accumulating_embedding
from tprimat.plan.schema import RunPlan


def layers_of_last_stage(shape: ModelShape, stages: int) -> int:
    """Return how many layers the last pipeline stage gets, so that the slowest stage has the least to multiply.

    The output layer is as much work as some layers; the other stages share the rest evenly.

    Args:
        shape: of the model; its matrices count, attention's products of tokens with tokens do not.
        stages: pipeline stages, 2 or more.
    """
    layer = sum(matrix.active_parameters for matrix in [*attention_matrices(shape), *feed_forward_matrices(shape)])
    output = padded_vocabulary(shape) * shape.hidden / layer
    others = stages - 1

    def slowest(last: int) -> float:
        return max(last + output, (shape.layers - last) / others)

    even = shape.layers // stages
    choices = [last for last in range(1, even + 1) if (shape.layers - last) % others == 0]
    return min(reversed(choices), key=slowest, default=even)


INITIAL_STANDARD_DEVIATION = 0.02
"""Used by Megatron-LM, GPT-2 and Llama; divided by sqrt(2 layers) for the two projections back into the residual stream."""
MEGATRON_ROPE_SCALING = (1.0, 4.0, 8192)
"""Low and high frequency factor and original context, fixed in megatron.core's rotary_pos_embedding.py: Llama 3.1's."""

PARAMETER_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}
"""By precision; under fp8 only the layers' matrix products are in 8 bits."""


def _refuse(shape: ModelShape) -> None:
    """Refuse shapes that would train as something else."""
    if shape.experts or shape.kv_lora_rank:
        raise LaunchError(f"The embedded engine trains dense models only; {shape.name} has experts or latent attention.")
    if shape.rope_scaling and _scaling_range(shape.rope_scaling) != MEGATRON_ROPE_SCALING:
        raise LaunchError(
            f"Megatron-Core scales rotary frequencies between {MEGATRON_ROPE_SCALING} only, not as {shape.name} does."
        )


def transformer_config(plan: RunPlan, device: torch.device, options: ResolvedOptions) -> TransformerConfig:
    """Return Megatron's description of the model and of how it runs."""
    shape, layout = plan.shape, plan.layout
    _refuse(shape)
    dtype = PARAMETER_DTYPES[plan.precision]
    on_gpu = device.type == "cuda"
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=shape.gated,
        activation_func=F.silu if shape.gated else F.gelu,
        normalization="RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=shape.norm_epsilon,
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        # With two stages both directions connect the same two ranks, and batched messages would be mixed up
        # (Megatron-LM's validate_args requires overlap there for that reason).
        overlap_p2p_comm=layout.virtual_pipeline is not None,
        batch_p2p_comm=layout.virtual_pipeline is None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=options.accumulate_weight_gradients,
        cross_entropy_loss_fusion=on_gpu,
        # gloo reads a tensor in a thread of its own, after Megatron has freed it; NCCL is ordered by stream.
        deallocate_pipeline_outputs=on_gpu,
        **(transformer_engine.settings(plan) if options.layers == "transformer_engine" else _unfused(plan, on_gpu)),
        **_stages(plan, options),
        **_recompute(plan),
    )


def _scaling_range(scaling: RopeScaling) -> tuple[float, float, int]:
    return scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_context_tokens


def _leave_as_is(weight: Tensor) -> Tensor:
    """Keep a weight: Megatron's initialisation runs only because it also marks how a weight is split."""
    return weight


def _unfused(plan: RunPlan, on_gpu: bool) -> dict[str, Any]:
    shape = plan.shape
    return {
        "bias_activation_fusion": on_gpu and (shape.gated or shape.linear_bias),
        "bias_dropout_fusion": False,
        "cross_entropy_fusion_impl": "native",
    }


def _stages(plan: RunPlan, options: ResolvedOptions) -> dict[str, Any]:
    layout = plan.layout
    if not options.balanced_stages or layout.pipeline == 1 or layout.virtual_pipeline:
        return {}
    return {"num_layers_in_last_pipeline_stage": layers_of_last_stage(plan.shape, layout.pipeline)}


def _recompute(plan: RunPlan) -> dict[str, Any]:
    if plan.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if plan.recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {}


def build_chunks(plan: RunPlan, config: TransformerConfig, options: ResolvedOptions) -> list[GPTModel]:
    """Build this rank's part of the model, one chunk or several under virtual pipelining, with initial weights."""
    stages = plan.layout.virtual_pipeline
    return [_build_chunk(plan, config, options, stage) for stage in (range(stages) if stages else [None])]


def _build_chunk(plan: RunPlan, config: TransformerConfig, options: ResolvedOptions, virtual_stage: int | None) -> GPTModel:
    shape = plan.shape
    rotary = _rotary(shape, config) if options.compiled_regions and shape.position == "rope" else None
    kind: Any = GPTModel
    if options.streamed_cross_entropy:
        kind = partial(ChunkedLossModel, compile_regions=options.compiled_regions)
    if options.layers == "transformer_engine":
        spec = transformer_engine.block_spec(config, shape, virtual_stage)
    else:
        spec = block_spec(config, shape, virtual_stage, rotary, _linear(plan, options))
    model = kind(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(shape),
        max_sequence_length=plan.batch.sequence_tokens if shape.position == "rope" else shape.context_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        # Where our attention rotates queries and keys, Megatron must not rotate them again.
        position_embedding_type="none" if rotary else "rope" if shape.position == "rope" else "learned_absolute",
        rotary_base=int(shape.rope_base),
        rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=shape.rope_scaling.factor if shape.rope_scaling else 1.0,
        vp_stage=virtual_stage,
    )
    if options.accumulate_weight_gradients and not shape.tied_embeddings and options.layers == "local":
        use_accumulating_embedding(model)
    defer_residual_add(model)
    _initialize(model, config, plan.seed, get_transformer_layer_offset(config, vp_stage=virtual_stage))
    return model


def _linear(plan: RunPlan, options: ResolvedOptions) -> tuple[type[ColumnLinear], type[RowLinear]]:
    products = Fp8Products if plan.precision == "fp8" else NativeProducts
    return linear_types(products, overlapped=options.overlap_tensor_parallel)


def _rotary(shape: ModelShape, config: TransformerConfig) -> Callable[[int], Rotation]:
    """Return Megatron's table of angles, computed once for each sequence length."""
    table = RotaryEmbedding(
        kv_channels=shape.head_dim,
        rotary_percent=1.0,
        rotary_base=int(shape.rope_base),
        rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=shape.rope_scaling.factor if shape.rope_scaling else 1.0,
        use_cpu_initialization=config.use_cpu_initialization,
    )

    @cache
    def rotation(tokens: int) -> Rotation:
        angles = table(tokens)
        return angles.cos(), angles.sin()

    return rotation


def _initialize(model: GPTModel, config: TransformerConfig, seed: int, first_layer: int) -> None:
    """Draw each matrix whole, from a generator seeded by its global name, and keep this rank's slice.

    Megatron's own initialisation differs between pipeline layouts; this one gives every layout the same model.
    """
    tied = model.share_embeddings_and_output_weights
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        # The last stage's copy of a tied embedding must start like the first stage's; Megatron then keeps them equal.
        origin = "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else _global(name, first_layer)
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}:{origin}".encode()))
        deviation = INITIAL_STANDARD_DEVIATION
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            deviation /= (2 * config.num_layers) ** 0.5
        with torch.no_grad():
            parameter.copy_(_slice_of_drawn(parameter, generator, _stride(name, config)) * deviation)


def _global(name: str, first_layer: int) -> str:
    parts = name.split(".")
    if "layers" in parts:
        place = parts.index("layers") + 1
        parts[place] = str(int(parts[place]) + first_layer)
    return ".".join(parts)


def _stride(name: str, config: TransformerConfig) -> int:
    """Return how many blocks a matrix interleaves over ranks: 2 for SwiGLU's gate and up. Megatron-Core 0.15 does not mark it."""
    return 2 if config.gated_linear_unit and name.endswith("linear_fc1.weight") else 1


def _slice_of_drawn(parameter: Tensor, generator: torch.Generator, stride: int) -> Tensor:
    split = bool(getattr(parameter, "tensor_model_parallel", False))
    ranks = parallel_state.get_tensor_model_parallel_world_size() if split else 1
    dim = getattr(parameter, "partition_dim", 0) if split else 0
    shape = list(parameter.shape)
    shape[dim] *= ranks
    whole = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    if ranks == 1:
        return whole
    blocks = torch.split(whole, parameter.shape[dim] // stride, dim=dim)
    return torch.cat(blocks[parallel_state.get_tensor_model_parallel_rank() :: ranks], dim=dim)
