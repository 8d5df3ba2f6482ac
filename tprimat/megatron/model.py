"""RunPlan -> Megatron-Core's GPTModel: the exact architecture, split as the plan says, with the same weights in every layout."""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tprimat.core.errors import LaunchError
from tprimat.core.flops import layers_of_last_stage
from tprimat.core.models import ModelShape, padded_vocabulary
from tprimat.core.rows import DATA, document, placed
from tprimat.megatron import compat
from tprimat.megatron.attention import Rotation
from tprimat.megatron.experts import ExpertsLayer
from tprimat.megatron.fp8 import Fp8Products
from tprimat.megatron.layers import block_spec, expert_layers, transformer_engine_spec
from tprimat.megatron.linear import LinearProducts, linear_types
from tprimat.megatron.loss import ChunkedLossModel
from tprimat.megatron.wgrad import AccumulatingEmbedding
from tprimat.plan.graphs import launches_graphs
from tprimat.plan.megatron_names import config_fields, layout_fields, recompute_fields, router_fields, routing_fields
from tprimat.plan.schema import EngineOptions, RunPlan
from tprimat.train.observed import watch_routers

INITIAL_STANDARD_DEVIATION = 0.02
"""Used by Megatron-LM, GPT-2 and Llama; divided by sqrt(2 layers) for the two projections back into the residual stream."""
MEGATRON_ROPE_SCALING = (1.0, 4.0, 8192)
"""Low and high frequency factor and original context, fixed in megatron.core's rotary_pos_embedding.py: Llama 3.1's."""

PARAMETER_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}
"""By precision; under fp8 only the layers' matrix products are in 8 bits."""
ALWAYS: Mapping[str, Any] = document(DATA / "framework_settings.yaml")["embedded"]
"""What is the same for every plan."""
AMAX_HISTORY = 1024
"""Steps whose largest value scales a tensor under delayed scaling; as in NeMo's recipes (nemo/collections/llm/recipes)."""


def transformer_config(plan: RunPlan, device: torch.device, options: EngineOptions) -> TransformerConfig:
    """Return Megatron's description of the model and of how it runs."""
    shape = plan.workload.shape
    scaling = shape.rope_scaling
    if scaling is not None:  # the model would train as something else
        limits = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_context_tokens
        if limits != MEGATRON_ROPE_SCALING:
            what = f"Megatron-Core scales rotary frequencies between {MEGATRON_ROPE_SCALING} only, not as {shape.name} does."
            raise LaunchError(what)
    dtype = PARAMETER_DTYPES[plan.workload.matmul_dtype]
    on_gpu, layout = device.type == "cuda", plan.workload.layout
    balanced = options.balanced_stages and layout.pipeline > 1 and not layout.virtual_pipeline
    unfused = {"bias_dropout_fusion": False, "cross_entropy_fusion_impl": "native"}
    unfused["bias_activation_fusion"] = on_gpu and (shape.gated or shape.linear_bias)
    kind = TransformerConfig if shape.kv_lora_rank is None else MLATransformerConfig
    return kind(
        gated_linear_unit=shape.gated,
        activation_func=F.silu if shape.gated else F.gelu,
        normalization="RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        add_bias_linear=shape.linear_bias,
        qk_layernorm=shape.qk_norm or shape.kv_lora_rank is not None,
        **ALWAYS["config"],
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # On the meta device Megatron must not name another one for its weights.
        use_cpu_initialization=not on_gpu or options.fully_shard,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        gradient_accumulation_fusion=options.accumulate_weight_gradients,
        cross_entropy_loss_fusion=on_gpu,
        # gloo reads a tensor in a thread of its own, after Megatron has freed it; NCCL is ordered by stream.
        deallocate_pipeline_outputs=on_gpu,
        **(_transformer_engines(plan) if options.layers == "transformer_engine" else unfused),
        **config_fields(shape),
        **layout_fields(layout),
        **_messages(plan),
        num_layers_in_last_pipeline_stage=layers_of_last_stage(shape, layout.pipeline) if balanced else None,
        **recompute_fields(plan.workload),
        **_experts(plan, options),
        **_latent_attention(shape),
    )


def _messages(plan: RunPlan) -> dict[str, bool]:
    """Return how stages of a pipeline send activations."""
    virtual = plan.workload.layout.virtual_pipeline is not None
    return {
        # With two stages both directions connect the same two ranks, and batched messages would be mixed up
        # (Megatron-LM's validate_args requires overlap there for that reason).
        "overlap_p2p_comm": virtual,
        "batch_p2p_comm": not virtual,
        # True: the host waits for the device after each message, and so launches no graph ahead. Megatron-Core guards with it
        # against a race of torch that pytorch/pytorch#82450 mended.
        "batch_p2p_sync": not launches_graphs(plan),
    }


def _leave_as_is(weight: Tensor) -> Tensor:
    """Keep a weight: Megatron's initialization runs only because it also marks how a weight is split."""
    return weight


def _transformer_engines(plan: RunPlan) -> dict[str, Any]:
    """Return what Megatron-LM sets in a TransformerConfig where Transformer Engine is installed, with its fused loss and Adam."""
    fused: dict[str, Any] = {
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": plan.workload.shape.position == "rope" and plan.workload.shape.kv_lora_rank is None,
        "cross_entropy_fusion_impl": "te",
    }
    if launches_graphs(plan):
        # Megatron-Core records nothing for it, but tells Transformer Engine's loss not to ask the device.
        fused |= compat.whole_step_graphs()
    if plan.workload.matmul_dtype == "fp8":
        fused["fp8"] = "hybrid"
        if plan.engine_options.fp8_scaling == "current":
            fused["fp8_recipe"] = "tensorwise"
        else:
            fused |= {"fp8_recipe": "delayed", "fp8_amax_history_len": AMAX_HISTORY, "fp8_amax_compute_algo": "max"}
    return fused


def _experts(plan: RunPlan, options: EngineOptions) -> dict[str, Any]:
    shape = plan.workload.shape
    if not shape.experts:
        return {}
    settings = {
        "moe_layer_freq": [int(number >= shape.dense_first_layers) for number in range(shape.layers)],
        "moe_shared_expert_intermediate_size": (shape.expert_ffn or 0) * shape.shared_experts or None,
        **ALWAYS["experts"],
        **router_fields(shape),
        **routing_fields(plan.workload),
    }
    if options.layers == "transformer_engine":
        settings |= {"moe_grouped_gemm": True, "moe_permute_fusion": True}
    return settings


def _latent_attention(shape: ModelShape) -> dict[str, Any]:
    """Return the settings of multi-head latent attention, without the rescaling of positions that serves longer contexts."""
    if shape.kv_lora_rank is None:
        return {}
    constants = {"multi_latent_attention": True, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    return constants | placed("megatron_names.latent_attention", shape=shape)


def build_chunks(plan: RunPlan, config: TransformerConfig, options: EngineOptions, device: torch.device) -> list[GPTModel]:
    """Build this rank's part of the model on the device, one chunk or several under virtual pipelining, with initial weights."""
    stages = plan.workload.layout.virtual_pipeline
    chunks = []
    for stage in range(stages) if stages else [None]:
        with torch.device("meta") if options.fully_shard else nullcontext():
            chunk = _build_chunk(plan, config, options, stage)
        chunk = split_over_replicas(chunk, device) if options.fully_shard else chunk.to(device)
        _initialize(chunk, config, plan.seed, get_transformer_layer_offset(config, vp_stage=stage))
        chunks.append(chunk)
    return chunks


def _build_chunk(plan: RunPlan, config: TransformerConfig, options: EngineOptions, virtual_stage: int | None) -> GPTModel:
    shape = plan.workload.shape
    experts, rotary, kind = expert_layers(config, shape, virtual_stage), None, GPTModel
    if options.layers == "transformer_engine":
        spec = transformer_engine_spec(shape, experts)
    else:
        norms_are_scales = shape.norm == "rmsnorm" or not shape.qk_norm
        if shape.position == "rope" and shape.kv_lora_rank is None and norms_are_scales:
            rotary = _rotary(shape, config)
        products = Fp8Products if plan.workload.matmul_dtype == "fp8" else LinearProducts
        spec = block_spec(shape, experts, linear_types(products, overlapped=bool(options.overlap_tensor_parallel)), rotary)
        kind = ChunkedLossModel
    model = kind(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(shape),
        max_sequence_length=plan.workload.sequence_tokens if shape.position == "rope" else shape.context_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        # Where our attention rotates queries and keys, Megatron must not rotate them again.
        position_embedding_type="none" if rotary else "rope" if shape.position == "rope" else "learned_absolute",
        **_rotary_settings(shape),
        vp_stage=virtual_stage,
    )
    if options.accumulate_weight_gradients and not shape.tied_embeddings and options.layers == "local":
        for part in model.modules():
            if type(part) is VocabParallelEmbedding:
                part.__class__ = AccumulatingEmbedding
    if options.layers == "transformer_engine":
        watch_routers(model)
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, ExpertsLayer):  # Megatron, which knows only its own class of experts, would recompute an mlp
            layer.recompute_mlp = False
    return model


def _rotary_settings(shape: ModelShape) -> dict[str, Any]:
    scaling = shape.rope_scaling
    return {
        "rotary_base": int(shape.rope_base),
        "rope_scaling": scaling is not None,
        "rope_scaling_factor": scaling.factor if scaling else 1.0,
    }


def _rotary(shape: ModelShape, config: TransformerConfig) -> Callable[[int], Rotation]:
    """Return Megatron's table of angles, computed once for each sequence length."""
    on_cpu = config.use_cpu_initialization
    table = RotaryEmbedding(shape.head_dim, rotary_percent=1.0, use_cpu_initialization=on_cpu, **_rotary_settings(shape))

    @cache
    def rotation(tokens: int) -> Rotation:
        angles = table(tokens)
        return angles.cos(), angles.sin()

    return rotation


def _initialize(model: GPTModel, config: TransformerConfig, seed: int, first_layer: int) -> None:
    """Draw each matrix whole, from a generator seeded by its global name, and keep this rank's part; norms are 1, biases 0.

    Megatron's own initialization differs between pipeline layouts; this one gives every layout the same model.
    """
    tied = model.share_embeddings_and_output_weights
    experts_here = (config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts_here * parallel_state.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            continue
        # The last stage's copy of a tied embedding must start like the first stage's; Megatron then keeps them equal.
        origin = "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else _global(name, first_layer)
        deviation = INITIAL_STANDARD_DEVIATION
        if LAST_OF_BLOCK.search(name):
            deviation /= (2 * config.num_layers) ** 0.5
        # SwiGLU's gate and up are two blocks of a matrix, which ranks interleave; Megatron-Core 0.15 does not mark it.
        stride = 2 if config.gated_linear_unit and name.endswith("linear_fc1.weight") else 1
        with torch.no_grad():
            for source, matrix in _matrices(origin, parameter, first_expert):
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}:{source}".encode()))
                split = ".experts." not in name and getattr(parameter, "tensor_model_parallel", False)
                drawn = (_slice_of_drawn(matrix, generator, split=bool(split), stride=stride) * deviation).to(config.params_dtype)
                if isinstance(matrix, DTensor):
                    drawn = distribute_tensor(drawn, matrix.device_mesh, matrix.placements, src_data_rank=None)
                matrix.copy_(drawn)


LAST_OF_BLOCK = re.compile(r"(linear_proj|linear_fc2)\.weight\d*$")
EXPERT = re.compile(r"(.*\.experts\..*\.weight)(\d*)$")
"""A weight of all experts of a rank, or of one, numbered on that rank (Transformer Engine)."""


def _matrices(origin: str, parameter: Tensor, first_expert: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each matrix of a parameter with its global name; that of an expert has the expert's number among all."""
    match = EXPERT.match(origin)
    if match is None:
        yield origin, parameter
        return
    name, number = match.groups()
    for place, matrix in enumerate([parameter] if number else parameter, start=int(number or 0)):
        yield f"{name}:{first_expert + place}", matrix


def _global(name: str, first_layer: int) -> str:
    parts = name.split(".")
    if "layers" in parts:
        place = parts.index("layers") + 1
        parts[place] = str(int(parts[place]) + first_layer)
    return ".".join(parts)


def _slice_of_drawn(matrix: Tensor, generator: torch.Generator, *, split: bool, stride: int) -> Tensor:
    ranks = parallel_state.get_tensor_model_parallel_world_size() if split else 1
    dim = getattr(matrix, "partition_dim", 0) if ranks > 1 else 0
    shape = list(matrix.shape)
    shape[dim] *= ranks
    whole = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    if ranks == 1:
        return whole
    blocks = torch.split(whole, matrix.shape[dim] // stride, dim=dim)
    return torch.cat(blocks[parallel_state.get_tensor_model_parallel_rank() :: ranks], dim=dim)


# Weights, gradients and optimizer states split over the replicas: ZeRO-3 (arXiv:1910.02054), by torch's fully_shard (FSDP2). Each
# data-parallel and context-parallel rank keeps its rows of every weight in fp32; a layer gathers its weights in bf16 before it
# computes. The model is built on the meta device; then each rank draws one matrix after the other whole, and keeps its rows.
# Losses and norms are those of whole weights; in bf16, a weight's gradient is rounded in each micro-batch, before the sum in
# fp32.


def split_over_replicas(model: GPTModel, device: torch.device) -> GPTModel:
    """Split the weights of a model on the meta device, and return it with memory for this rank's part, but no values yet.

    The model is whole on this rank: neither tensor nor pipeline parallelism, no experts.
    """
    mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(with_context_parallel=True), device.type)
    precision = MixedPrecisionPolicy(param_dtype=model.config.params_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    model.float()
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # A tied weight belongs to the model itself, which gathers it for both passes.
    if not model.share_embeddings_and_output_weights:
        fully_shard(model.embedding, mesh=mesh, mp_policy=precision)
        # The loss multiplies with the output weight after its module has returned, and the backward pass begins there.
        ends = [model.decoder.final_layernorm, model.output_layer]
        fully_shard(ends, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model.to_empty(device=device)


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: its rows where the tensor is split, otherwise all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks_sharing(weight: Tensor) -> int:
    """Return over how many ranks fully_shard has split a weight; 1 for a whole one."""
    return weight.device_mesh.size() if isinstance(weight, DTensor) else 1
