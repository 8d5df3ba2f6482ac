"""The pieces of a training step that other probes leave out: what a prediction of its time is composed of.

- The three products of each weight matrix, at 1,024 to 16,384 rows: forward (fprop), for the gradient that flows on (dgrad) and
  for the weight's, added to an fp32 sum by the product itself (wgrad). Operands lie in memory as training has them, so that
  the libraries choose the same kernels: m, k and n are those of the product, not of the layer. The same in fp8, at fewer numbers
  of rows.
- Grouped products of experts, with as many rows for each, and with as few for most as a router in training gives; in fp8 too, but
  for the weights' gradients, which training leaves in bf16.
- Attention over one sequence, which fills a GPU less than the many of `attention`, and with narrower heads.
- Compiled element-wise regions, forward and backward: residual sum and norm, SwiGLU. Each tensor read or written counts once.
- Launches: thousands of tiny operations in a row, which take as long as the host needs for them.
- On several ranks: a collective beside products, which slows them since both wait for the same memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, distributed
from torch.nn import functional

from tprimat.core.effort import Effort
from tprimat.core.flops import gemm_shapes
from tprimat.core.models import ModelShape, model_shape, tiny
from tprimat.probe import attention, gemm
from tprimat.probe.case import Call, Case

EFFORT = Effort(warmup_seconds=0.2, seconds=0.2)
"""Brief, since there are many; a median of a few hundred calls or of 0.2 s."""
PRODUCT_EFFORT = Effort(warmup_seconds=0.05, loaded_seconds=0.4, seconds=0.25, relative_interval=None)
"""At the clock of sustained work: on an H200 a burst of products of 1,024 rows ran at 1.98 GHz, one of 16,384 rows at 1.48
(benchmarks/records/h200/probes-1gpu)."""
UNDER_LOAD = ", under load"
ROWS = (1024, 2048, 4096, 8192, 16384)
FP8_ROWS = (2048, 8192)
SMALL_ROWS = (64, 128)
TENSOR_RANKS = (1, 4)
DENSE_MODEL = "llama-3.1-8b"
EXPERT_MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
EXPERT_TOKENS = 8192
SMALL_EXPERT_TOKENS = 128
SKEW = 0.5
"""Expert number i gets rows in proportion to 1 / i^SKEW: the most popular of 8 has twice its share, of 128 six times."""
GROUPED_KINDS = ("grouped_fprop", "grouped_dgrad", "grouped_wgrad")
ALIGNMENT = 16
"""Rows of each expert are a multiple of it, which the kernels require."""
SEQUENCE_LENGTHS = (4096, 8192, 16384)
SMALL_SEQUENCE_LENGTHS = (64,)
ATTENTION_BACKENDS = ("cudnn", "flash")
REGION_NUMBERS = 2**28
"""Of each tensor, so that the device takes longer than the host does to launch both passes."""
LAUNCHES = 2000
SMALL_LAUNCHES = 50
LAUNCH_ELEMENTS = 64
LAUNCH_EFFORT = Effort(flush=False, seconds=0.5)


def cases(*, small: bool, on_cpu: bool = False) -> list[Case]:
    """Return every piece that one device measures. Torch has some for GPUs only."""
    return [
        *product_cases("bf16", small=small),
        *product_cases("fp8", small=small),
        *(case for case in grouped_cases(small=small) if not (on_cpu and case.dtype == "fp8")),
        *attention_cases([name for name in ATTENTION_BACKENDS if not (on_cpu and name in attention.NOT_ON_A_CPU)], small=small),
        *region_cases(small=small),
        *launch_cases(small=small),
    ]


# Products.


def sized(name: str, *, small: bool) -> ModelShape:
    """Return the shape of a known model, or of its tiny version."""
    shape = model_shape(name)
    return tiny(shape) if small else shape


def forward_call(product: gemm.Product, device: torch.device) -> Call:
    """Return rows times a weight stored as (n, k)."""
    return gemm.plain_call(product, "bf16", "F.linear", device)


def dgrad_call(product: gemm.Product, device: torch.device) -> Call:
    """Return gradient (m, k) times a weight stored as (k, n): outputs by inputs."""
    gradient = torch.randn(product.m, product.k, device=device, dtype=torch.bfloat16)
    return partial(torch.matmul, gradient, torch.randn(product.k, product.n, device=device, dtype=torch.bfloat16))


def wgrad_call(product: gemm.Product, device: torch.device) -> Call:
    """Return sum (m, n), fp32, += gradient.T times rows; both are stored with k, the tokens, first."""
    gradient = torch.randn(product.k, product.m, device=device, dtype=torch.bfloat16)
    rows = torch.randn(product.k, product.n, device=device, dtype=torch.bfloat16)
    total = torch.zeros(product.m, product.n, device=device)
    if device.type == "cpu":  # torch has no such product there
        return lambda: total.addmm_(gradient.t().float(), rows.float())
    return partial(torch.addmm, total, gradient.t(), rows, out_dtype=total.dtype, out=total)


def fp8_forward_call(product: gemm.Product, device: torch.device) -> Call:
    """Return rows times a weight stored as (n, k), both e4m3."""
    return gemm.fp8_call(product, gemm.FP8_CALLS[0], device)


def fp8_gradient_call(product: gemm.Product, device: torch.device) -> Call:
    """Return a product of gradients in e5m2 with e4m3, whose partial sums move to fp32, as fp8 training multiplies them."""
    left = torch.randn(product.m, product.k, device=device, dtype=torch.bfloat16).to(gemm.fp8_dtype(gradient=True))
    right = torch.randn(product.n, product.k, device=device, dtype=torch.bfloat16).to(gemm.fp8_dtype()).t()
    one = torch.ones((), device=device)
    return partial(torch._scaled_mm, left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=False)


CALLS: dict[str, tuple[tuple[str, Callable[[gemm.Product, torch.device], Call]], ...]] = {
    "bf16": (("fprop", forward_call), ("dgrad", dgrad_call), ("wgrad", wgrad_call)),
    "fp8": (("fprop", fp8_forward_call), ("dgrad", fp8_gradient_call), ("dgrad", fp8_gradient_call)),
}
"""Forward product and both gradients of a matrix. In fp8 both gradients are called dgrad: they differ in their shapes alone."""


def product_cases(dtype: str, *, small: bool) -> list[Case]:
    """Return the three products of each matrix of a layer."""
    in_fp8 = dtype == "fp8"
    few, many = (SMALL_ROWS[-1:], FP8_ROWS) if in_fp8 else (SMALL_ROWS, ROWS)
    found: dict[tuple[object, ...], Case] = {}
    for ranks in (1,) if small else TENSOR_RANKS:
        for rows in few if small else many:
            for matrix in gemm_shapes(sized(DENSE_MODEL, small=small), 1, rows, ranks):
                if matrix.name == "output" and (in_fp8 or ranks == 1):
                    continue  # stays in bf16; gigabytes of logits, a quarter of which is multiplied at the same rate
                m, k, n = matrix.m, matrix.k, matrix.n
                products = (gemm.Product(m=m, k=k, n=n), gemm.Product(m=m, k=n, n=k), gemm.Product(m=n, k=m, n=k))
                for (kind, make), product in zip(CALLS[dtype], products, strict=True):
                    case = Case(
                        kind=kind,
                        variant=matrix.name + UNDER_LOAD,
                        shape=product.shape,
                        dtype=dtype,
                        flop=product.flop,
                        prepare=partial(make, product),
                        effort=PRODUCT_EFFORT,
                    )
                    found.setdefault((kind, *product.shape.values()), case)
    return list(found.values())


# Experts.


def rows_of_experts(total: int, experts: int, *, skewed: bool) -> list[int]:
    """Return the rows of each expert, multiples of ALIGNMENT that add up to `total`."""
    weights = [(number + 1) ** -SKEW if skewed else 1.0 for number in range(experts)]
    blocks, whole = total // ALIGNMENT, sum(weights)
    ends = [round(blocks * sum(weights[: number + 1]) / whole) * ALIGNMENT for number in range(experts)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def grouped_call(kind: str, counts: list[int], inputs: int, outputs: int, device: torch.device) -> Call:
    """Return one of the three products of all experts: rows (T, inputs), weights (experts, inputs, outputs)."""
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    multiply = torch._grouped_mm
    if kind == "grouped_wgrad":
        return partial(multiply, make(sum(counts), inputs).t(), make(sum(counts), outputs), offs=ends)
    weights = make(len(counts), outputs, inputs)
    if kind == "grouped_dgrad":
        return partial(multiply, make(sum(counts), outputs), weights, offs=ends)
    return partial(multiply, make(sum(counts), inputs), weights.transpose(1, 2), offs=ends)


def fp8_grouped_call(kind: str, counts: list[int], inputs: int, outputs: int, device: torch.device) -> Call:
    """Return forward product or dgrad of all experts in e4m3, with a scale for each row and column; see grouped_fp8.py."""
    dtype, total, experts = gemm.fp8_dtype(), sum(counts), len(counts)
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    summed, produced = (inputs, outputs) if kind == "grouped_fprop" else (outputs, inputs)
    rows = torch.randn(total, summed, device=device, dtype=torch.bfloat16).to(dtype)
    weights = torch.randn(experts, produced, summed, device=device, dtype=torch.bfloat16).to(dtype).transpose(1, 2)
    scales = torch.ones(total, device=device), torch.ones(experts, produced, device=device)
    return partial(torch._scaled_grouped_mm, rows, weights, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)


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
                for kind, dtype in (*((kind, "bf16") for kind in GROUPED_KINDS), *((kind, "fp8") for kind in GROUPED_KINDS[:2])):
                    m, k, n = {
                        "grouped_fprop": (total // experts, inputs, outputs),
                        "grouped_dgrad": (total // experts, outputs, inputs),
                        "grouped_wgrad": (inputs, total // experts, outputs),
                    }[kind]
                    cases.append(
                        Case(
                            kind=kind,
                            variant=("skewed" if skewed else "equal") + UNDER_LOAD,
                            shape={"m": m, "k": k, "n": n, "experts": experts, "largest": max(counts)},
                            dtype=dtype,
                            flop=2 * total * inputs * outputs,
                            prepare=partial(fp8_grouped_call if dtype == "fp8" else grouped_call, kind, counts, inputs, outputs),
                            effort=PRODUCT_EFFORT,
                        )
                    )
    return cases


# Attention, regions, launches.


def attention_cases(backends: Sequence[str], *, small: bool) -> list[Case]:
    """Return attention over one sequence, and over several with heads half as wide."""
    lengths = SMALL_SEQUENCE_LENGTHS if small else SEQUENCE_LENGTHS
    choices = [(attention.Operands(1, length), "one sequence") for length in lengths]
    choices.append((attention.Operands(2, lengths[0], width=attention.HEAD_DIM // 2), "narrow heads"))
    return [
        replace(case, variant=f"{case.variant}, {name}", effort=EFFORT, fallback=None)
        for operands, name in choices
        for backend in backends
        for backward in (False, True)
        for case in (attention.case_of(backend, operands, backward=backward),)
    ]


def sum_and_norm(branch: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and its RMS norm."""
    stream = branch + residual
    return stream, functional.rms_norm(stream, weight.shape, weight, 1e-5)


def swiglu(joint: Tensor) -> Tensor:
    """Return silu(gate) times up, the halves of the last dimension."""
    gate, up = joint.chunk(2, dim=-1)
    return functional.silu(gate) * up


def forward_and_backward(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: list[Tensor]) -> Call:
    """Return both passes of a compiled function as a call. On a processor nothing is compiled: no speed is measured there."""
    on_cpu = inputs[0].device.type == "cpu"
    compiled = torch.compile(function, dynamic=False, backend="aot_eager" if on_cpu else "inductor")
    first = compiled(*inputs)
    gradients = [torch.randn_like(result) for result in ((first,) if isinstance(first, Tensor) else first)]

    def both() -> object:
        results = compiled(*inputs)
        return torch.autograd.grad((results,) if isinstance(results, Tensor) else results, inputs, gradients)

    return both


def norm_call(tokens: int, hidden: int, device: torch.device) -> Call:
    """Return residual sum and norm of (tokens, hidden)."""
    make = partial(torch.randn, device=device, dtype=torch.bfloat16, requires_grad=True)
    return forward_and_backward(sum_and_norm, [make(tokens, hidden), make(tokens, hidden), make(hidden)])


def swiglu_call(tokens: int, ffn: int, device: torch.device) -> Call:
    """Return SwiGLU of (tokens, 2 ffn)."""
    return forward_and_backward(swiglu, [torch.randn(tokens, 2 * ffn, device=device, dtype=torch.bfloat16, requires_grad=True)])


def region_cases(*, small: bool) -> list[Case]:
    """Return both regions of a layer. Norm: 4 tensors each way; SwiGLU: reads 2 and writes 1, then reads 3 and writes 2."""
    shape = sized(DENSE_MODEL, small=small)
    regions = (("residual and norm", shape.hidden, norm_call), ("SwiGLU", shape.ffn, swiglu_call))
    return [
        Case(
            kind="region",
            variant=name,
            shape={"tokens": tokens, "width": width},
            dtype="bf16",
            bytes=8 * tokens * width * 2,
            prepare=partial(make, tokens, width),
            effort=EFFORT,
        )
        for name, width, make in regions
        for tokens in (SMALL_ROWS[-1] if small else REGION_NUMBERS // width,)
    ]


def launch_kernels(count: int, device: torch.device) -> Call:
    """Return a call that adds 1 to the same few numbers again and again."""
    tiny_tensor = torch.zeros(LAUNCH_ELEMENTS, device=device)

    def launch() -> None:
        for _ in range(count):
            tiny_tensor.add_(1.0)

    return launch


def launch_autograd(count: int, device: torch.device) -> Call:
    """Return a call of half as many multiplications, and their backward passes."""
    start = torch.ones(LAUNCH_ELEMENTS, device=device, requires_grad=True)
    one = torch.ones(LAUNCH_ELEMENTS, device=device)

    def launch() -> object:
        result = start
        for _ in range(count // 2):
            result = result * one
        return torch.autograd.grad(result, start, one)

    return launch


def launch_cases(*, small: bool) -> list[Case]:
    """Return launches from Python alone, and through autograd in both passes."""
    count = SMALL_LAUNCHES if small else LAUNCHES
    return [
        Case(
            kind="launch",
            variant=name,
            shape={"launches": count},
            dtype="fp32",
            prepare=partial(make, count),
            effort=LAUNCH_EFFORT,
        )
        for name, make in (("kernels", launch_kernels), ("autograd", launch_autograd))
    ]


# On several ranks.

OVERLAP_KIND = "overlapped"
OVERLAPPED_PRODUCT = gemm.Product(m=8192, k=4096, n=14336)
OVERLAPPED_BYTES = (2**26, 2**28)
SMALL_OVERLAPPED_BYTES = (2**16,)
OVERLAPPED_PRODUCTS = 2
"""So many in a row take longer than any of the messages."""
OVERLAP_EFFORT = Effort(repetitions=50, warmup=10, warmup_seconds=None, relative_interval=None, seconds=None)


def overlap_call(operation: Callable[[Tensor, int], Call], product: gemm.Product | None, size: int, device: torch.device) -> Call:
    """Return the start of a collective, the products in the meantime, and the wait for it; without products if None."""
    ranks = distributed.get_world_size()
    exchange = operation(torch.randn(size // 2 // ranks * ranks, device=device, dtype=torch.bfloat16), ranks)
    multiply = forward_call(product, device) if product else None

    def both() -> None:
        work = exchange(async_op=True)  # type: ignore[call-arg]
        if multiply:
            for _ in range(OVERLAPPED_PRODUCTS):
                multiply()
        work.wait()  # type: ignore[attr-defined]

    return both


def products_alone(product: gemm.Product, device: torch.device) -> Call:
    """Return the products without a collective."""
    multiply = forward_call(product, device)

    def all_of_them() -> None:
        for _ in range(OVERLAPPED_PRODUCTS):
            multiply()

    return all_of_them


def overlap_cases(ranks: int, operations: dict[str, Callable[[Tensor, int], Call]], *, small: bool) -> list[Case]:
    """Return the products alone, each collective alone, and both at once. The calls of the collectives take `async_op`."""
    product = OVERLAPPED_PRODUCT.shrunk() if small else OVERLAPPED_PRODUCT
    flop = OVERLAPPED_PRODUCTS * product.flop
    whole: dict[str, int] = {**product.shape, "ranks": ranks}

    def case(variant: str, shape: dict[str, int], prepare: Callable[[torch.device], Call], *, multiplies: bool) -> Case:
        return Case(
            kind=OVERLAP_KIND,
            variant=variant,
            shape=shape,
            dtype="bf16",
            flop=flop * ranks if multiplies else None,
            prepare=prepare,
            effort=OVERLAP_EFFORT,
        )

    cases = [case("products", whole, partial(products_alone, product), multiplies=True)]
    for name, operation in operations.items():
        for size in SMALL_OVERLAPPED_BYTES if small else OVERLAPPED_BYTES:
            shape = {**whole, "message_bytes": size}
            cases += [
                case(name, shape, partial(overlap_call, operation, None, size), multiplies=False),
                case(f"{name} beside products", shape, partial(overlap_call, operation, product, size), multiplies=True),
            ]
    return cases
