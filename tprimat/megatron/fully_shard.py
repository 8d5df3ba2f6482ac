"""Weights, gradients and optimizer states split over the replicas: ZeRO-3 (arXiv:1910.02054), by torch's fully_shard (FSDP2).

Each data-parallel and context-parallel rank keeps its rows of every weight in fp32: 16 bytes per weight with gradient and
moments, divided by the ranks. A layer gathers its weights in bf16 before it computes and drops them afterwards, in both passes.
Gradients are averaged over the ranks in fp32 after each micro-batch and added up as shards. The model is built on the meta
device; then each rank draws one matrix after the other whole, and keeps its rows.

Tensors that autograd keeps stay valid, because fully_shard gathers into the same storage again. Losses and norms are those of
whole weights; in bf16, a weight's gradient is rounded in each micro-batch, before the sum in fp32.
"""

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


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


def split_like(weight: Tensor, whole: Tensor) -> Tensor:
    """Return the whole value of a weight as the weight is split: the whole itself, or this rank's part of it."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: its rows where the tensor is split, otherwise all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks_sharing(weight: Tensor) -> int:
    """Return over how many ranks fully_shard has split a weight; 1 for a whole one."""
    return weight.device_mesh.size() if isinstance(weight, DTensor) else 1
