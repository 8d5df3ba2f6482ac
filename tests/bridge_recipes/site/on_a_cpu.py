"""Megatron-Bridge without a GPU: what its trainer sends to CUDA goes to the CPU, to check that shrunk recipes train.

sitecustomize.py calls `redirect` when a rank is about to import tprimat.bridge.compat.
"""

from contextlib import nullcontext

import torch


def redirect():
    from tprimat.megatron import bootstrap

    if not bootstrap.redirect_to_cpu():
        return
    from megatron.bridge.training import initialize, setup
    from megatron.core.transformer.moe import token_dispatcher

    from tprimat.bridge import recipe

    replace_cuda()
    genuine, build = setup.initialize_megatron, recipe.build_config
    setup.initialize_megatron = lambda **arguments: genuine(allow_no_cuda=True, **arguments)
    initialize._warmup_jit_function = lambda *_, **__: None
    initialize._set_random_seed = with_megatrons_generators(initialize._set_random_seed)
    token_dispatcher.maybe_move_tensor_to_cpu = on_the_host
    recipe.build_config = lambda plan: for_a_cpu(build(plan))


def for_a_cpu(cfg):
    """Take gloo, Megatron-Core's local layers, and no kernel of Transformer Engine or Apex."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    from tprimat.bridge.recipe import exchange_tokens_by_nccl

    model, cfg.env_vars = cfg.model, {}
    model.use_cpu_initialization = True
    cfg.dist.distributed_backend, cfg.dist.use_gloo_process_groups = "gloo", True
    model.transformer_layer_spec, model.transformer_impl, model.attention_backend = local_layer_spec, "local", None
    for name in (
        "apply_rope_fusion",
        "persist_layer_norm",
        "masked_softmax_fusion",
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
        "use_te_rng_tracker",
        "moe_permute_fusion",
        "moe_grouped_gemm",
        "moe_router_fusion",
    ):
        setattr(model, name, False)
    model.cross_entropy_fusion_impl, model.cuda_graph_impl = "native", "none"
    if model.num_moe_experts:
        exchange_tokens_by_nccl(model)
    cfg.rng.te_rng_tracker, cfg.comm_overlap = False, None
    optimizer = cfg.optimizer
    optimizer.use_precision_aware_optimizer = False
    optimizer.main_grads_dtype = optimizer.main_params_dtype = torch.float32
    optimizer.exp_avg_dtype = optimizer.exp_avg_sq_dtype = torch.float32
    return cfg


def replace_cuda():
    """One function each, as torch's compiler wants it."""
    replacements = {
        "current_stream": lambda *_: Nothing(),
        "default_stream": lambda *_: Nothing(),
        "stream": lambda *_: nullcontext(),
        "set_device": lambda *_: None,
        "manual_seed_all": lambda _: None,
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: Nothing(),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (0, 0),
        "memory_stats": lambda *_: {},
        "max_memory_allocated": lambda *_: 0,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.nn.Module.cuda = lambda self, *_, **__: self


def with_megatrons_generators(seed_the_rest):
    """Seed Megatron's generators, too: Bridge leaves them out where there is no CUDA device."""
    from megatron.core import tensor_parallel

    def seed_all(seed_, *arguments, **named):
        seed_the_rest(seed_, *arguments, **named)
        tensor_parallel.model_parallel_cuda_manual_seed(seed_)

    return seed_all


def on_the_host(tensor, as_numpy=False, record_stream=False):
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class Nothing:
    """A stream, an event or a GPU where there is none: a CPU does one thing after the other."""

    name = ""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: self

    def query(self):
        """What it stands for has always ended."""
        return True

    def elapsed_time(self, _):
        """Nothing takes time."""
        return 0.0
