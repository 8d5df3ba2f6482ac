"""Every private name of Megatron-Core, torch and Lightning that the embedded engine uses, under a plain name and checked.

What is cheap to check is checked when this module is imported, the rest at first use. No other file of the trainers touches a
private name of these packages (tests/train/test_compat.py). Import it after `tprimat.megatron.bootstrap` has done its work.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from operator import methodcaller
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import CheckpointWithoutOutput, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.attention import SDPBackend

from tprimat.train.compat import LIGHTNING, changed, lightning, require

# Functions of torch.

foreach_norm = require("torch", torch, "_foreach_norm")
foreach_multiply_ = require("torch", torch, "_foreach_mul_")
foreach_zero_ = require("torch", torch, "_foreach_zero_")
assert_on_device = require("torch", torch, "_assert_async")
"""Assert that a tensor of one element is true, without waiting for the device."""
scaled_matmul = require("torch", torch, "_scaled_mm")
"""Product of two 8-bit matrices with their scales; the second one column-major."""
fused_attention_choice = require("torch", torch, "_fused_sdp_choice")


def grouped_matmul(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply slices of rows, which end at `ends`, each with its own matrix, without waiting for the ends on the host.

    What rows after the last end become is undefined. With rows transposed, the slices are of the summed dimension, and the result
    is a matrix for each slice.
    """
    return require("torch", torch, "_grouped_mm")(rows, matrices, offs=ends)  # type: ignore[no-any-return]


def attention_backend_name(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> str:
    """Return which kernels torch selects for causal attention: cudnn_attention, flash_attention, efficient_attention or math."""
    choice = fused_attention_choice(query, key, value, is_causal=True, enable_gqa=grouped)
    return SDPBackend(choice).name.lower()


QkvTensors = tuple[Tensor, Tensor, Tensor]
AttentionOutput = tuple[Tensor, Tensor]
"""Result of attention, and the logarithm of the sum of each row."""


class CudnnAttention:
    """Fused attention that also returns the logarithm of the sum of each row: cuDNN's, in 16 bits.

    Operands have the shape (sequences, heads, tokens, head_dim), with as many key/value heads as heads or fewer; sums (sequences,
    heads, tokens, 1) in fp32.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Any]:
        """Return the result, its sums, and the state that the backward pass takes."""
        attend = require("torch", torch.ops.aten, "_scaled_dot_product_cudnn_attention")
        out, sums, first, second, longest, longest_key, seed, offset, _ = attend(query, key, value, None, True, 0.0, causal)
        return out, sums, (seed, offset, None, first, second, longest, longest_key)

    def backward(
        self, gradient: Tensor, operands: QkvTensors, results: AttentionOutput, state: Any, *, causal: bool
    ) -> QkvTensors:
        """Return the gradients of queries, keys and values; result and sums may be over more keys than these."""
        differentiate = require("torch", torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward")
        return differentiate(gradient, *operands, *results, *state, 0.0, causal)  # type: ignore[no-any-return]


# torch's compiler, for the element-wise parts that all layers share.


MAX_SHAPES = 64
"""Of one function's arguments. Beyond torch's own limit of 8 a function runs uncompiled, with no more than a warning."""


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled version of a function, one for the whole process, with a graph for each shape that it meets."""
    config = import_module("torch._dynamo").config
    require("torch", config, "recompile_limit")
    config.recompile_limit = max(config.recompile_limit, MAX_SHAPES)
    return torch.compile(function, dynamic=False)


@cache
def compiled_for_any_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled version of a function whose tensors change their number of rows from call to call."""
    return torch.compile(function)


def triton_kernels(operand: Tensor) -> ModuleType | None:
    """Return kernels.py for an operand on a GPU; None elsewhere, and without Triton to compile it."""
    return _kernels() if operand.is_cuda else None


@cache
def _kernels() -> ModuleType | None:
    try:
        return import_module("tprimat.megatron.kernels")
    except ImportError:
        return None


# Memory that the GPUs of a machine read from each other.


def symmetric_memory() -> Any:
    """Return torch's module for it."""
    return import_module("torch.distributed._symmetric_memory")


# Functions of Megatron-Core that the engine replaces or overrides.

OVERRIDDEN: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (SelfAttention, "get_query_key_value_tensors", ("self", "hidden_states")),
    (TransformerLayer, "forward", ("self",)),
    (MLP, "forward", ("self", "hidden_states")),
    (VocabParallelEmbedding, "forward", ("self", "input_")),
    (ColumnParallelLinear, "forward", ("self", "input_", "weight", "runtime_gather_output")),
    (RowParallelLinear, "forward", ("self", "input_")),
    (GPTModel, "forward", ("self", "input_ids", "position_ids", "attention_mask", "decoder_input", "labels")),
    (GPTModel, "compute_language_model_loss", ("self", "labels", "logits")),
    (MegatronOptimizer, "get_grad_stats_parallel_group", ("self",)),
    (MegatronOptimizer, "prepare_grads", ("self",)),
    (MegatronOptimizer, "step_with_ready_grads", ("self",)),
    (DistributedOptimizer, "_copy_model_grads_to_main_grads", ("self",)),
    (DistributedOptimizer, "_get_model_param_range_map", ("self", "param")),
    (megatron_random, "_set_cuda_rng_state", ("new_state", "device", "graph_safe")),
)
"""Owner, name and first parameters of what a subclass of ours overrides, or a part of Megatron's own step that ours calls."""
for _owner, _name, _parameters in OVERRIDDEN:
    require("megatron-core", _owner, _name, _parameters)

_for_norm = "get_grads_for_grad_norm" if hasattr(MegatronOptimizer, "get_grads_for_grad_norm") else "get_main_grads_for_grad_norm"
require("megatron-core", MegatronOptimizer, _for_norm, ("self",))
gradients_for_norm: Callable[[MegatronOptimizer], list[Tensor]] = methodcaller(_for_norm)
"""Method of Megatron's optimizers that returns the gradients whose norm counts on this rank; before 0.19 under another name."""

# Since 0.18 a layer's spec holds a function that builds its feed-forward block, where 0.17 and older hold a ModuleSpec.
BUILDS_FEED_FORWARD = hasattr(MLP, "as_mlp_submodule")


def feed_forward_parts(spec: Any) -> Any:
    """Return the submodules of the feed-forward block of a layer's spec."""
    return spec.keywords["submodules"] if BUILDS_FEED_FORWARD else spec.submodules


def feed_forward_spec(kind: type[MLP], submodules: Any) -> Any:
    """Return the spec of a feed-forward block."""
    if BUILDS_FEED_FORWARD:
        return partial(require("megatron-core", kind, "as_mlp_submodule"), submodules=submodules)
    return ModuleSpec(module=kind, submodules=submodules)


def experts_spec(kind: Callable[..., torch.nn.Module], params: dict[str, Any]) -> Any:
    """Return the spec of a block with experts that takes a configuration and these parameters."""
    if not BUILDS_FEED_FORWARD:
        return ModuleSpec(module=kind, params=params)

    def build(*, config: Any, **_: Any) -> torch.nn.Module:
        return kind(config=config, **params)

    return build


def whole_step_graphs() -> dict[str, Any]:
    """Return the settings that tell Megatron's model that whole steps are recorded in CUDA graphs; it records none of its own."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    if "cuda_graph_modules" in fields:  # since 0.18
        return {"cuda_graph_impl": "full_iteration"}
    return {"cuda_graph_scope": "full_iteration"}


def hand_on_gradients(optimizer: Any) -> None:
    """Let a distributed optimizer of Megatron's give its fp32 weights the gradients as they are, instead of copies in fp32.

    Optimizers of other kinds go on copying, and so do all where torch, before 2.10, wants both to be of one dtype.
    """
    if isinstance(optimizer, DistributedOptimizer) and hasattr(Tensor, "grad_dtype"):
        optimizer._copy_model_grads_to_main_grads = partial(_hand_on_gradients, optimizer)


def _hand_on_gradients(optimizer: DistributedOptimizer) -> None:
    if optimizer.is_stub_optimizer:  # this rank has no weights of the kind that it updates
        return
    groups = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
    parts = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
    for weights, own_parts in zip(groups, parts, strict=True):
        for weight, own_part in zip(weights, own_parts, strict=True):
            place = optimizer._get_model_param_range_map(weight)["param"]
            if own_part.dtype != weight.main_grad.dtype:
                own_part.grad_dtype = weight.main_grad.dtype
            own_part.grad = weight.main_grad.view(-1)[place.start : place.end]


def do_without_te_in_latent_attention() -> None:
    """Tell Megatron's latent attention that Transformer Engine is missing, where it is: 0.16.1 tests its placeholders instead."""
    if not isinstance(require("megatron-core", multi_latent_attention, "HAVE_TE"), bool):
        raise changed("megatron-core", "multi_latent_attention.HAVE_TE", "has another kind of flag")
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False


def recompute_norms_without_fp8() -> None:
    """Let Megatron recompute norms without Transformer Engine: its default for "no fp8" is False, and it tests for None."""
    begin = require("megatron-core", CheckpointWithoutOutput, "__init__", ("self", "fp8"))
    if begin.__defaults__ not in {(False,), (None,)}:
        raise changed("megatron-core", "CheckpointWithoutOutput", "has other defaults")
    begin.__defaults__ = (None,)


def replace_set_cuda_rng_state(replacement: Callable[..., None]) -> None:
    """Replace what sets the state of a GPU's random number generator."""
    megatron_random._set_cuda_rng_state = replacement


def keep_gradients(chunk: DistributedDataParallel, kept: set[torch.nn.Parameter]) -> None:
    """Let the `zero_grad_buffer` of a chunk clear only the gradients of weights that are not in `kept`."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        require("megatron-core", type(buffer), "reset", ("self",))
        buffer.reset = partial(_clear, [weight.main_grad for weight in buffer.params if weight not in kept])


def _clear(gradients: list[Tensor]) -> None:
    if gradients:
        foreach_zero_(gradients)


# Lightning.

for _name in ("_get_process_group_backend", "_register_ddp_hooks", "setup_distributed"):
    require("lightning", lightning.strategies.DDPStrategy, _name, ("self",))
if "timeout" not in inspect.signature(lightning.strategies.DDPStrategy).parameters:
    raise changed("lightning", f"{LIGHTNING}.strategies.DDPStrategy", "lacks the parameter timeout")


class UnwrappedDDPStrategy(lightning.strategies.DDPStrategy):  # type: ignore[misc]
    """DDPStrategy without torch's DDP: no wrapping, no hooks, no broadcast of parameters."""

    def setup_distributed(self) -> None:
        """Join the process group: Lightning would tie it to a device, and NCCL then connect all of Megatron's groups at once."""
        if not dist.is_initialized():
            dist.init_process_group(self._get_process_group_backend(), timeout=self._timeout)
        super().setup_distributed()

    def configure_ddp(self) -> None:
        """Do nothing: Megatron's DistributedDataParallel already wraps each chunk."""

    def _register_ddp_hooks(self) -> None:
        pass
