"""The class of work that the name of a kernel stands for.

Names are those that profilers show for NCCL and RCCL, cuBLAS and hipBLASLt, cuDNN, FlashAttention, AOTriton, Composable Kernel,
DeepEP, DeepGEMM, Triton (as torch.compile emits it), Transformer Engine and torch's own kernels. A copy from one GPU's memory to
another's (PtoP) is communication. An unknown name is "other".
"""

import re
from functools import cache
from typing import Literal, get_args

WorkClass = Literal[
    "matmul",
    "attention",
    "norm_elementwise",
    "optimizer",
    "other",
    "communication",
    "memory_copy",
    "expert_matmul",
    "router",
    "permute",
]

COMPUTE: tuple[WorkClass, ...] = (
    "matmul",
    "expert_matmul",
    "router",
    "permute",
    "attention",
    "norm_elementwise",
    "optimizer",
    "other",
)
"""Classes that can hide communication."""

KERNELS: tuple[tuple[WorkClass, str], ...] = (
    # torch.compile names a pointwise or reducing kernel after all operators in it, also an attention or collective beside it.
    ("norm_elementwise", r"^triton_(poi|red|per|for|spl|unk)_"),
    (
        "communication",
        r"nccl|rccl|msccl|nvshmem|rocshmem|gloo:|userbuffers|symm_mem|symmetric_memory|^memcpy ptop|all_?reduce|all_?gather"
        r"|reduce_?scatter|all_?to_?all|cross_device_reduce|onerankreduce"
        # Exchanges of an expert's tokens: DeepEP, its kernels inside DeepSeek, its hybrid branch, and MORI of AMD.
        r"|deep_ep(?!i)|dpsk::ep::|hybrid_ep|\bmori::|epdispatch|epcombine",
    ),
    ("memory_copy", r"^memcpy|^memset|^copy(host|device)to|rocclr"),
    # Transformer Engine's scaling factors of many tensors, and the Hadamard transform before it rounds to NVFP4.
    ("norm_elementwise", r"multi_tensor_(un)?swizzle|hadamard|rht_gemm"),
    # CuTe's Python begins all names alike; the class follows, and then its arguments.
    (
        "norm_elementwise",
        r"^kernel_cutlass_kernel_(?!\w*?(gemm|attention)\w*?_object_at)\w*?(norm|softmax|entropy|quant)\w*?_object_at",
    ),
    # Of a mixture of experts: our kernels.py and Transformer Engine's; torch's and CUTLASS's products of groups.
    # CUTLASS's NoPermute is a parameter of any product, and FBGEMM's permute moves rows of embeddings.
    (
        "permute",
        r"(?<!no)(?<!fbgemm_gpu::)permute(?!_pooled_embs)|row_id_map|sort_chunks|chunk_sort|moe_?(align|sorting)|ep_scatter",
    ),
    (
        "expert_matmul",
        r"groupproblemshape|group(ed)?_?(gemm|mm)|gemm_?grouped|moe_?(mx)?gemm|gemm_?moe|fused_moe_kernel|matmul_ogs",
    ),
    ("expert_matmul", r"gemm::gemmtype\)[1-35-9]"),  # DeepGEMM's kinds of groups: 0 has none, and 4 is a batch
    ("expert_matmul", r"^_(sdd|dsd|dds)_kernel|scatter2scatter|groupxty"),  # MegaBlocks and ScatterMoE
    ("router", r"topk|bitonicsort|fused_router|moe_aux_loss|routing"),
    (
        "attention",
        # FlashInfer's namespace also holds norms and activations.
        r"flash(?!infer)|fmha|sdpa|attn|attention|aotriton|bwd_preprocess|bwd_kernel_(dk_?dv|dq|fuse)|dot_do_o|convert_dq_to"
        r"|mla_(a\d|dec|pfl|prefill|reduce)|thd_(lse|out_correction|grad_correction)|sage_fwd|(prefill|decode)with(paged|ragged)?kvcache"
        r"|delta_rule|chunk_(scan|state)_|selective_scan",  # linear attention and Mamba
    ),
    ("optimizer", r"adam|multi_?tensor|lamb_|l2norm(?!_(fwd|bwd))|foreach|koptimizer|kprecondition"),
    (
        "matmul",
        r"(?<!fb)gem[mv]|nvjet|cutlass|xmma|cublas|splitk|[cd]ijk_|hipblaslt|tensile|wgmma|matmul|^triton_(tem|mm)_|bmm|^_?(scaled_)?mm_"
        r"|_cce_|scudnn|winograd|convolve|(dgrad|wgrad)\w*_engine",
    ),
    (
        "norm_elementwise",
        r"elementwise|vectorized|unrolled|triton_|norm|softmax|reduce|glu|silu|gelu|relu|act_and_mul|rope|rotary|dropout|embedding"
        r"|index|gather|scatter|entropy|nll_loss|catarray|copy|fill|transpose|nchw|nhwc|permute|cast|quant|bias|cub::|rocprim|radix"
        r"|distribution|arange|triu|element_mul|gammabeta|causal_conv1d|cudnn::bn_|compute_grad_weight"
        r"|transformer_engine|at::(native|cuda)|_zn2at6native",  # whose products, attention and optimizer are named above
    ),
)
"""The first pattern found in a kernel's lower-case name decides."""


@cache
def kernel_class(name: str) -> WorkClass:
    """Return the class of a kernel on an accelerator."""
    small = name.lower()
    return next((kind for kind, pattern in KERNELS if re.search(pattern, small)), "other")


CLASSES: tuple[WorkClass, ...] = get_args(WorkClass)
