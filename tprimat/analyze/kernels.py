"""Which kind of work a kernel, or an operator on a CPU, does: told by its name, as the libraries name theirs.

Names are those that profilers show for NCCL and RCCL, cuBLAS and hipBLASLt, cuDNN, FlashAttention, AOTriton, Composable Kernel,
Triton (as torch.compile emits it), Transformer Engine and torch's own kernels. A copy from one GPU's memory to another's (PtoP)
is communication. A name that says nothing stays "other".
"""

import re
from functools import cache
from typing import Literal

WorkClass = Literal["matmul", "attention", "norm_elementwise", "optimizer", "other", "communication", "memory_copy"]

COMPUTE: tuple[WorkClass, ...] = ("matmul", "attention", "norm_elementwise", "optimizer", "other")
"""What communication can hide behind."""

KERNELS: tuple[tuple[WorkClass, str], ...] = (
    (
        "communication",
        r"nccl|rccl|nvshmem|gloo:|userbuffers|symm_mem|symmetric_memory|^memcpy ptop|all_?reduce|all_?gather"
        r"|reduce_?scatter|cross_device_reduce",
    ),
    ("memory_copy", r"^memcpy|^memset|^copy(host|device)to|rocclr"),
    # torch.compile names a pointwise or reducing kernel after all operators in it, which may be neighbours of an attention.
    ("norm_elementwise", r"^triton_(poi|red|per|for)_"),
    ("attention", r"flash|fmha|sdpa|attn|attention|aotriton|bwd_preprocess"),
    ("optimizer", r"adam|multi_?tensor|lamb_|l2norm|foreach"),
    ("matmul", r"gem[mv]|nvjet|cutlass|xmma|cublas|splitk|cijk_|hipblaslt|tensile|wgmma|matmul|^triton_(tem|mm)_"),
    (
        "norm_elementwise",
        r"elementwise|vectorized|unrolled|triton_|norm|softmax|reduce|swiglu|silu|gelu|rope|rotary|dropout|embedding|index|gather"
        r"|scatter|entropy|nll_loss|catarray|copy|fill|transpose|cast|quantize|bias|cub::|rocprim|radix|distribution|arange|triu"
        r"|compute_grad_weight",
    ),
)
"""The first pattern that is found in a kernel's name, in small letters, decides."""

OPERATORS: tuple[tuple[WorkClass, str], ...] = (
    ("communication", r"gloo:|c10d::|nccl:|record_param_comms"),
    ("attention", r"scaled_dot_product|attention"),
    ("optimizer", r"adam|_foreach_|^optimizer_step$|^optimizer\.step#"),
    ("matmul", r"^aten::(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|mv|einsum|_scaled_mm|_int_mm)(_|\.|$)|mkldnn_linear"),
    ("memory_copy", r"^aten::(copy_|_to_copy|to|clone|contiguous)$"),
    ("norm_elementwise", r"^aten::"),
)
"""The same for what runs on the host; every further operator of ATen is elementwise, a reduction or a view."""


@cache
def kernel_class(name: str) -> WorkClass:
    """The class of a kernel that ran on an accelerator."""
    return _first(KERNELS, name)


@cache
def operator_class(name: str) -> WorkClass:
    """The class of an operator that ran on the host."""
    return _first(OPERATORS, name)


def _first(patterns: tuple[tuple[WorkClass, str], ...], name: str) -> WorkClass:
    small = name.lower()
    return next((kind for kind, pattern in patterns if re.search(pattern, small)), "other")
