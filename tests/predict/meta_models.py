"""Megatron-Core's own models without memory, in a process group that only pretends to exist: how many weights a rank holds."""

from collections.abc import Iterator
from contextlib import contextmanager

from tprimat.core.models import ModelShape, padded_vocabulary
from tprimat.core.workload import Layout
from tprimat.megatron import bootstrap
from tprimat.train import startup

startup.import_torchmetrics()
bootstrap.redirect_to_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

multi_latent_attention.HAVE_TE = False  # it is importable without Transformer Engine, and then takes None for its classes


@contextmanager
def pretended_ranks(layout: Layout, rank: int) -> Iterator[None]:
    """Be one rank of a layout whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        create_gloo_process_groups=False,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def weights_of_rank(shape: ModelShape, layout: Layout, stage: int) -> int:
    """Return how many weights Megatron-Core gives the first rank of a pipeline stage."""
    rank = stage * layout.world_size // layout.pipeline
    with pretended_ranks(layout, rank), torch.device("meta"):
        config = _config(shape, layout)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=NORMS[shape.norm])
        for layer in spec.layer_specs:
            # It has no weights, and the local one does not know latent attention.
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocabulary(shape),
            max_sequence_length=shape.context_tokens,
            pre_process=stage == 0,
            post_process=stage == layout.pipeline - 1,
            position_embedding_type="rope" if shape.position == "rope" else "learned_absolute",
            share_embeddings_and_output_weights=shape.tied_embeddings,
        )
        return sum(weight.numel() for weight in model.parameters())


NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def _config(shape: ModelShape, layout: Layout) -> TransformerConfig:
    latent = shape.kv_lora_rank is not None
    more = {}
    if latent:
        more = {
            "q_lora_rank": shape.q_lora_rank,
            "kv_lora_rank": shape.kv_lora_rank,
            "qk_head_dim": shape.nope_head_dim,
            "qk_pos_emb_head_dim": shape.rope_head_dim,
            "v_head_dim": shape.value_head_dim,
            "rope_type": "rope",
        }
    if shape.experts:
        more |= {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_pre_softmax": shape.experts_per_token == 1,
            "moe_ffn_hidden_size": shape.expert_ffn,
            "moe_shared_expert_intermediate_size": shape.shared_experts * (shape.expert_ffn or 0) or None,
            "moe_layer_freq": [0] * shape.dense_first_layers + [1] * shape.moe_layers,
            "moe_token_dispatcher_type": "allgather",
        }
    return (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.heads if latent else shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=shape.gated,
        activation_func=F.silu if shape.gated else F.gelu,
        normalization=NORMS[shape.norm],
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or latent,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        sequence_parallel=False,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        **more,
    )
