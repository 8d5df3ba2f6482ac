"""The pieces of a training step that other probes leave out: what a prediction of its time is composed of.

Operands of products lie in memory as training has them, so that the libraries choose the same kernels: m, k and n are those of
the product, not of the layer. Weights' gradients are added to an fp32 sum by the product itself; those of experts stay in bf16.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tprimat.core.flops import gemm_shapes
from tprimat.core.models import ModelShape, model_shape, tiny
from tprimat.probe import attention, gemm
from tprimat.probe.case import Call, Case, Effort

EFFORT = Effort(warmup_seconds=0.2, seconds=0.2)
"""Brief, since there are many; a median of a few hundred calls or of 0.2 s."""
PRODUCT_EFFORT = Effort(warmup_seconds=0.05, loaded_seconds=0.4, seconds=0.25)
"""At the clock of sustained work: on an H200 a burst of products of 1,024 rows ran at 1.98 GHz, one of 16,384 rows at 1.48
(benchmarks/records/h200/probes-1gpu)."""
UNDER_LOAD = ", under load"
ROWS, SMALL_ROWS = (1024, 2048, 4096, 8192, 16384), (64, 128)
FP8_ROWS = (2048, 8192)
TENSOR_RANKS = (1, 4)
DENSE_MODEL = "llama-3.1-8b"
EXPERT_MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
EXPERT_TOKENS, SMALL_EXPERT_TOKENS = 8192, 128
SKEW = 0.5
"""Expert number i gets rows in proportion to 1 / i^SKEW: the most popular of 8 has twice its share, of 128 six times."""
ALIGNMENT = 16
"""Rows of each expert are a multiple of it, which the kernels require."""
SEQUENCE_LENGTHS, SMALL_SEQUENCE_LENGTHS = (4096, 8192, 16384), (64,)
REGION_NUMBERS = 2**28
"""Of each tensor, so that the device takes longer than the host does to launch both passes."""
LAUNCHES, SMALL_LAUNCHES = 2000, 50
LAUNCH_ELEMENTS = 64
LAUNCH_EFFORT = Effort(flush=False, seconds=0.5)


def cases(*, small: bool, on_cpu: bool = False) -> list[Case]:
    """Return every piece that one device measures. Torch has some for GPUs only."""
    count = SMALL_LAUNCHES if small else LAUNCHES
    launch, shape = partial(prepare_launches, count), {"launches": count}
    return [
        *product_cases("bf16", small=small),
        *product_cases("fp8", small=small),
        *(case for case in grouped_cases(small=small) if not (on_cpu and case.dtype == "fp8")),
        *attention_cases(("flash",) if on_cpu else ("cudnn", "flash"), small=small),
        *region_cases(small=small),
        Case(kind="launch", variant="autograd", shape=shape, dtype="fp32", prepare=launch, effort=LAUNCH_EFFORT),
    ]


# Products.


def sized(name: str, *, small: bool) -> ModelShape:
    """Return the shape of a known model, or of its tiny version."""
    shape = model_shape(name)
    return tiny(shape) if small else shape


def prepare_pass(kind: str, product: gemm.Product, dtype: str, device: torch.device) -> Call:
    """Return one of the three products of a matrix, with its operands as training has them in memory.

    fprop: rows times a weight stored as (n, k). dgrad: gradient (m, k) times a weight stored as (k, n): outputs by inputs.
    wgrad: sum (m, n), fp32, += gradient.T times rows; both are stored with k, the tokens, first.

    In fp8 a gradient in e5m2 is multiplied with e4m3, and partial sums move to fp32, as fp8 training multiplies them.
    """
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    if kind == "fprop":
        return gemm.prepare(product, dtype, gemm.FP8_CALL if dtype == "fp8" else "F.linear", device)
    if dtype == "fp8":
        return gemm.prepare_fp8(product, device, gradient=True)
    if kind == "dgrad":
        return partial(torch.matmul, make(product.m, product.k), make(product.k, product.n))
    gradient, rows = make(product.k, product.m), make(product.k, product.n)
    total = torch.zeros(product.m, product.n, device=device)
    if device.type == "cpu":  # torch has no such product there
        return lambda: total.addmm_(gradient.t().float(), rows.float())
    return partial(torch.addmm, total, gradient.t(), rows, out_dtype=total.dtype, out=total)


KINDS = {"bf16": ("fprop", "dgrad", "wgrad"), "fp8": ("fprop", "dgrad", "dgrad")}
"""Forward product and both gradients of a matrix. In fp8 both gradients are called dgrad: they differ only in their shapes."""


def product_cases(dtype: str, *, small: bool) -> list[Case]:
    """Return the three products of each matrix of a layer."""
    in_fp8, unique = dtype == "fp8", dict[tuple[object, ...], Case]()
    few, many = (SMALL_ROWS[-1:], FP8_ROWS) if in_fp8 else (SMALL_ROWS, ROWS)
    for ranks in (1,) if small else TENSOR_RANKS:
        for rows in few if small else many:
            for matrix in gemm_shapes(sized(DENSE_MODEL, small=small), 1, rows, ranks):
                if matrix.name == "output" and (in_fp8 or ranks == 1):
                    continue  # stays in bf16; gigabytes of logits, a quarter of which is multiplied at the same rate
                m, k, n = matrix.m, matrix.k, matrix.n
                for kind, sides in zip(KINDS[dtype], ((m, k, n), (m, n, k), (n, m, k)), strict=True):
                    product = gemm.Product(*sides)
                    make = partial(prepare_pass, kind, product, dtype)
                    case = product.case(kind, matrix.name + UNDER_LOAD, dtype, make)
                    unique.setdefault((kind, product), replace(case, effort=PRODUCT_EFFORT))
    return list(unique.values())


# Experts.


def rows_of_experts(total: int, experts: int, *, skewed: bool) -> list[int]:
    """Return the rows of each expert, multiples of ALIGNMENT that add up to `total`."""
    weights = [(number + 1) ** -SKEW if skewed else 1.0 for number in range(experts)]
    blocks, whole = total // ALIGNMENT, sum(weights)
    ends = [round(blocks * sum(weights[: number + 1]) / whole) * ALIGNMENT for number in range(experts)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def prepare_grouped(kind: str, counts: list[int], sides: tuple[int, int], dtype: str, device: torch.device) -> Call:
    """Return one of the three products of all experts: rows (T, inputs), weights (experts, inputs, outputs).

    Forward product and dgrad in fp8 are e4m3, with a scale for each row and column.
    """
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    (inputs, outputs), total, experts = sides, sum(counts), len(counts)
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    if kind == "grouped_wgrad":
        return partial(torch._grouped_mm, make(total, inputs).t(), make(total, outputs), offs=ends)
    summed, produced = (inputs, outputs) if kind == "grouped_fprop" else (outputs, inputs)
    if dtype == "fp8":
        narrow = gemm.fp8_dtype()
        rows, weights = make(total, summed).to(narrow), make(experts, produced, summed).to(narrow).transpose(1, 2)
        scales = torch.ones(total, device=device), torch.ones(experts, produced, device=device)
        return partial(torch._scaled_grouped_mm, rows, weights, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
    weights = make(experts, outputs, inputs)
    return partial(
        torch._grouped_mm, make(total, summed), weights.transpose(1, 2) if kind == "grouped_fprop" else weights, offs=ends
    )


def grouped_cases(*, small: bool) -> list[Case]:
    """Return both matrices of the experts, with equal and with skewed numbers of rows. m is the mean of an expert."""
    cases = []
    for name in EXPERT_MODELS[:1] if small else EXPERT_MODELS:
        shape = sized(name, small=small)
        total = (SMALL_EXPERT_TOKENS if small else EXPERT_TOKENS) * (shape.experts_per_token or 1)
        hidden, ffn, experts = shape.hidden, shape.expert_ffn or shape.ffn, shape.experts or 1
        for skewed in (False, True):
            counts = rows_of_experts(total, experts, skewed=skewed)
            for inputs, outputs in ((hidden, 2 * ffn), (ffn, hidden)):
                products = {
                    "grouped_fprop": gemm.Product(total // experts, inputs, outputs),
                    "grouped_dgrad": gemm.Product(total // experts, outputs, inputs),
                    "grouped_wgrad": gemm.Product(inputs, total // experts, outputs),
                }
                variant, sizes = ("skewed" if skewed else "equal") + UNDER_LOAD, {"experts": experts, "largest": max(counts)}
                for kind, dtype in (*((kind, "bf16") for kind in products), ("grouped_fprop", "fp8"), ("grouped_dgrad", "fp8")):
                    make = partial(prepare_grouped, kind, counts, (inputs, outputs), dtype)
                    case = products[kind].case(kind, variant, dtype, make, **sizes)
                    cases.append(replace(case, flop=2 * total * inputs * outputs, effort=PRODUCT_EFFORT))
    return cases


# Attention, regions, launches.


def attention_cases(backends: tuple[str, ...], *, small: bool) -> list[Case]:
    """Return attention over one sequence, and over several with heads half as wide."""
    lengths = SMALL_SEQUENCE_LENGTHS if small else SEQUENCE_LENGTHS
    one = [(attention.Operands(1, length), "one sequence") for length in lengths]
    return [
        replace(case, variant=f"{case.variant}, {name}", effort=EFFORT)
        for operands, name in (*one, (attention.Operands(2, lengths[0], width=attention.HEAD_DIM // 2), "narrow heads"))
        for backend in backends
        for case in attention.both_passes(backend, operands)
    ]


def sum_and_norm(branch: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and its RMS norm."""
    stream = branch + residual
    return stream, functional.rms_norm(stream, weight.shape, weight, 1e-5)


def swiglu(joint: Tensor) -> tuple[Tensor]:
    """Return silu(gate) times up, the halves of the last dimension."""
    gate, up = joint.chunk(2, dim=-1)
    return (functional.silu(gate) * up,)


def forward_and_backward(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> Call:
    """Return both passes of a compiled function as a call. On a processor nothing is compiled: no speed is measured there."""
    on_cpu = inputs[0].device.type == "cpu"
    compiled = torch.compile(function, dynamic=False, backend="aot_eager" if on_cpu else "inductor")
    gradients = [torch.randn_like(result) for result in compiled(*inputs)]
    return lambda: torch.autograd.grad(compiled(*inputs), inputs, gradients)


def prepare_region(name: str, tokens: int, width: int, device: torch.device) -> Call:
    """Return residual sum and norm of (tokens, width), or SwiGLU of (tokens, 2 width)."""
    make = partial(torch.randn, device=device, dtype=torch.bfloat16, requires_grad=True)
    if name == "SwiGLU":
        return forward_and_backward(swiglu, [make(tokens, 2 * width)])
    return forward_and_backward(sum_and_norm, [make(tokens, width), make(tokens, width), make(width)])


def region_cases(*, small: bool) -> list[Case]:
    """Return both regions of a layer. Norm: 4 tensors each way; SwiGLU: reads 2 and writes 1, then reads 3 and writes 2."""
    shape = sized(DENSE_MODEL, small=small)
    return [
        Case(
            kind="region",
            variant=name,
            shape={"tokens": tokens, "width": width},
            dtype="bf16",
            bytes=8 * tokens * width * 2,
            prepare=partial(prepare_region, name, tokens, width),
            effort=EFFORT,
        )
        for name, width in (("residual and norm", shape.hidden), ("SwiGLU", shape.ffn))
        for tokens in (SMALL_ROWS[-1] if small else REGION_NUMBERS // width,)
    ]


def prepare_launches(count: int, device: torch.device) -> Call:
    """Return a call of half as many multiplications of the same few numbers as launches, and of their backward passes."""
    numbers = torch.ones(LAUNCH_ELEMENTS, device=device)
    start = torch.ones(LAUNCH_ELEMENTS, device=device, requires_grad=True)

    def autograd() -> object:
        result = start
        for _ in range(count // 2):
            result = result * numbers
        return torch.autograd.grad(result, start, numbers)

    return autograd
