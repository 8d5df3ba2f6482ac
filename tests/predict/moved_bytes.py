"""Started in tests as a process of its own: bytes that uncompiled element-wise operations read and write.

python tests/predict/moved_bytes.py PLAN.json ...

A line for each plan with the bytes of one layer, then one with the bytes of a logit in each kind of loss and of a weight in Adam.
"""

import json
from functools import partial

import torch
from one_layer import print_one_layer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS_AND_ATTENTION = {"mm", "addmm", "addmm_", "embedding", "embedding_dense_backward"}
ONE_ELEMENT_A_ROW = {"index", "index_put_", "gather"}
OVERWRITING = {"copy_", "fill_", "zero_"}


class Traffic(TorchDispatchMode):
    """Sums the bytes of the tensors that each operation reads and writes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        free = func.is_view or name in PRODUCTS_AND_ATTENTION | ONE_ELEMENT_A_ROW or "empty" in name or "scaled_dot" in name
        if not (self.paused or free or name in {"_unsafe_view", "_fused_sdp_choice"}):
            self.bytes += moved(func, args, kwargs or {}, result)
        return result

    def uncounted(self, function, *arguments):
        """Call a function."""
        outer, self.paused = self.paused, True
        try:
            return function(*arguments)
        finally:
            self.paused = outer

    def as_one(self, function, *arguments):
        """Call what a GPU runs as one kernel, which reads its arguments and writes its results."""
        result = self.uncounted(function, *arguments)
        self.bytes += 0 if self.paused else sum(size(tensor) for tensor in tensors((arguments, result)))
        return result


def moved(func, args, kwargs, result):
    """Return the bytes that an operation reads and writes by its schema."""
    total = sum(size(tensor) for tensor in tensors(result)) if all(out.alias_info is None for out in func._schema.returns) else 0
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        given = tensors(named.get(argument.name))
        written = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = argument.name == "out" or (written and func.overloadpacket.__name__ in OVERWRITING)
        again = argument.name == "tensor2" and given and tensors(named["tensor1"])[0] is given[0]  # squared: read once
        total += sum(size(tensor) for tensor in given) * (written + (not overwritten and not again))
    return total


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def size(tensor):
    """Return the bytes of a tensor; what a stride of zero repeats is read once."""
    repeats = [length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0]
    return tensor.numel() * tensor.element_size() // (torch.Size(repeats).numel() or 1)


TRAFFIC = Traffic()
torch.compile = lambda function, **_: lambda *arguments: TRAFFIC.as_one(function, *arguments)

from tprimat.megatron import bootstrap  # noqa: E402

bootstrap.redirect_to_cpu()


class FusedRMSNorm(torch.autograd.Function):
    """A GPU's kernels: one forward, two backward, which read input and gradient each. On a processor a norm is many operations.

    What they compute is not counted, and is left out.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return TRAFFIC.as_one(torch.zeros_like, x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_input = TRAFFIC.as_one(lambda x, _: torch.zeros_like(x), x, gradient)
        return of_input, TRAFFIC.as_one(lambda *_: torch.zeros_like(weight), x, gradient)


torch.nn.RMSNorm.forward = lambda norm, x: FusedRMSNorm.apply(x, norm.weight)

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.utils import local_multi_tensor_scale  # noqa: E402

from tprimat.megatron import linear, loss, model  # noqa: E402
from tprimat.megatron.options import resolve  # noqa: E402

OUR_PRODUCTS = model._linear
linear._wgrad = partial(TRAFFIC.uncounted, linear._wgrad)  # the time of products includes it


def of_model(plan):
    """Return the bytes of both passes."""
    device = torch.device("cpu")
    options = resolve(plan, device)
    config = model.transformer_config(plan, device, options)
    nemo = plan.engine == "nemo"  # whose recipes, without Transformer Engine, have our layers on Megatron-Core's products
    model._linear = (lambda *_: None) if nemo else OUR_PRODUCTS
    config.bias_activation_fusion = not (nemo and plan.workload.shape.name.startswith("qwen"))
    (chunk,) = model.build_chunks(plan, config, options, device)
    chunk = chunk.bfloat16()
    tokens = torch.zeros(plan.workload.micro_batch_sequences, plan.workload.sequence_tokens, dtype=torch.long)
    TRAFFIC.bytes = 0
    with TRAFFIC:
        chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).sum().backward()
    return TRAFFIC.bytes


def of_losses(rows=64, words=8192):
    """Return the bytes of a logit in a chunk that is not compiled, and in Megatron-Core's loss."""
    logits, targets = torch.randn(rows, 1, words).bfloat16().requires_grad_(), torch.zeros(rows, 1, dtype=torch.long)
    TRAFFIC.bytes = 0
    with TRAFFIC, torch.no_grad():
        _, log_sums = loss._losses(logits[:, 0], targets[:, 0], compile_regions=False)
        loss.loss_gradient(logits[:, 0], targets[:, 0], log_sums)
    chunked, TRAFFIC.bytes = TRAFFIC.bytes, 0
    with TRAFFIC:
        vocab_parallel_cross_entropy(logits.float(), targets).sum().backward()
    return {"chunked": chunked / logits.numel(), "native": TRAFFIC.bytes / logits.numel()}


def of_adam():
    """Return the bytes of a weight in Megatron-Core's scaling, torch's AdamW as it is on a GPU by default, and a copy in bf16."""
    weight = torch.zeros(4096, requires_grad=True)
    adam = torch.optim.AdamW([weight], foreach=True)
    weight.grad = torch.ones_like(weight)
    adam.step()  # creates the moments
    stored, gradients = weight.detach().bfloat16(), [weight.grad]
    TRAFFIC.bytes = 0
    with TRAFFIC:
        local_multi_tensor_scale(0, None, [gradients, gradients], 0.5)
        adam.step()
        stored.copy_(weight.detach())
    return TRAFFIC.bytes / weight.numel()


if __name__ == "__main__":
    print_one_layer(of_model)
    print(json.dumps({**of_losses(), "adam": of_adam()}))
