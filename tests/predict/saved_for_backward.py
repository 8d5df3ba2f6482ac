"""Started in tests as a process of its own: bytes that one layer of the engine's model saves for backward, a line for each plan.

python tests/predict/saved_for_backward.py PLAN.json ...
"""

from one_layer import print_one_layer

from tprimat.megatron import bootstrap

bootstrap.redirect_to_cpu()

import torch  # noqa: E402

from tprimat.megatron import layers  # noqa: E402


class FusedRMSNorm(torch.autograd.Function):
    """Saves what the kernel on a GPU does: its input and a number for each row. On a processor a norm is many operations."""

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        normed, reciprocal = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, epsilon)
        ctx.save_for_backward(x, weight, reciprocal)
        return normed


layers.rms_norm = FusedRMSNorm.apply
torch.compile = lambda function, **_: function  # hooks do not see into compiled regions; on a GPU they save the same

from tprimat.megatron.model import build_chunks, transformer_config  # noqa: E402
from tprimat.megatron.training import resolve  # noqa: E402


def saved_bytes(plan):
    """Return the bytes of all different memory, weights apart, that a forward pass leaves for the backward pass."""
    options = resolve(plan, torch.device("cpu"))
    device = torch.device("cpu")
    (model,) = build_chunks(plan, transformer_config(plan, device, options), options, device)
    model = model.bfloat16()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # holding it keeps its address from being used again
        return tensor

    batch = plan.workload
    tokens = torch.randint(0, plan.workload.shape.vocabulary, (batch.micro_batch_sequences, batch.sequence_tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return sum(storage.nbytes() for storage in kept.values())


if __name__ == "__main__":
    print_one_layer(saved_bytes)
