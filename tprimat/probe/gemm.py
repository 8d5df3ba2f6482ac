"""Matrix multiplication: the rate that bounds a training step.

A product of (m, k) and (k, n) counts 2 m n k floating-point operations. Operands are standard normal, because products of
zeros draw less power and run at a higher clock than training ever sees. fp8 products (e4m3, scales of one) accumulate fast and
give bf16; casting to fp8 is not timed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

from tprimat.facts.flops import gemm_shapes
from tprimat.facts.models import ModelShape, model_shape, tiny
from tprimat.probe.case import Case
from tprimat.probe.timing import Call

SEED_SHAPES: dict[str, tuple[int, int, int]] = {
    "square 4K": (4096, 4096, 4096),
    "square 8K": (8192, 8192, 8192),
    "square 16K": (16384, 16384, 16384),
    "fused QKV projection": (16384, 8192, 1280),
    "attention output": (16384, 1024, 8192),
    "feed-forward 1": (16384, 8192, 7168),
    "feed-forward 2": (16384, 3584, 8192),
}
"""(m, k, n): Llama 70B under eight-way tensor parallelism, and three squares (SemiAnalysis, 2024-12-22, part 1)."""

LIBRARIES = {"cuda": ("cublas", "cublaslt"), "rocm": ("cublas", "cublaslt"), "cpu": ()}
"""What torch.backends.cuda.preferred_blas_library takes. On ROCm these two mean rocBLAS and hipBLASLt."""
LIBRARY_NAMES = {
    ("cuda", "cublas"): "cuBLAS",
    ("cuda", "cublaslt"): "cuBLASLt",
    ("rocm", "cublas"): "rocBLAS",
    ("rocm", "cublaslt"): "hipBLASLt",
}
CALLS = ("torch.matmul", "F.linear")
FP8_CALLS = ("scaled_mm tensor-wise", "scaled_mm row-wise")
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
"""In the order in which they are measured: what training uses comes first."""
TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product: (m, k) times (k, n)."""

    m: int
    k: int
    n: int

    @property
    def flop(self) -> int:
        """A multiplication and an addition for each of m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def shape(self) -> dict[str, int]:
        """As records keep it."""
        return {"m": self.m, "k": self.k, "n": self.n}

    def shrunk(self) -> "Product":
        """For a processor: a 64th of each side, in whole sixteens, which fp8 kernels ask for."""
        m, k, n = (max(16, side // 64 // 16 * 16) for side in (self.m, self.k, self.n))
        return Product(m=m, k=k, n=n)


def fp8_dtype() -> torch.dtype:
    """The e4m3 of this GPU: gfx94x (MI300) has its own, with a shifted exponent and no infinities."""
    name = torch.cuda.get_device_properties(0).gcnArchName if torch.cuda.is_available() and torch.version.hip else ""
    return torch.float8_e4m3fnuz if name.startswith("gfx94") else torch.float8_e4m3fn


def plain_call(product: Product, dtype: str, call: str, device: torch.device) -> Call:
    """torch.matmul(a, b), b of shape (k, n); or F.linear(a, w), w of shape (n, k) as weights are stored."""
    if dtype == "tf32" and device.type == "cpu":
        raise ValueError("a processor has no tf32")
    a = torch.randn(product.m, product.k, device=device, dtype=TORCH_DTYPES[dtype])
    if call == "F.linear":
        return partial(functional.linear, a, torch.randn(product.n, product.k, device=device, dtype=a.dtype))
    return partial(torch.matmul, a, torch.randn(product.k, product.n, device=device, dtype=a.dtype))


def fp8_call(product: Product, call: str, device: torch.device) -> Call:
    """torch._scaled_mm with one scale for a whole operand, or one for each row of a and column of b."""
    dtype = fp8_dtype()
    a = torch.randn(product.m, product.k, device=device, dtype=torch.bfloat16).to(dtype)
    b = torch.randn(product.n, product.k, device=device, dtype=torch.bfloat16).to(dtype).t()
    rows, columns = ((product.m, 1), (1, product.n)) if call.endswith("row-wise") else ((), ())
    scale_a = torch.ones(rows, device=device, dtype=torch.float32)
    scale_b = torch.ones(columns, device=device, dtype=torch.float32)
    return partial(torch._scaled_mm, a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def prepare(product: Product, dtype: str, call: str, device: torch.device) -> Call:
    """Operands on the device, and the product as a call."""
    return fp8_call(product, call, device) if dtype == "fp8" else plain_call(product, dtype, call, device)


@contextmanager
def fp32_precision(dtype: str) -> Iterator[None]:
    """tf32 lets fp32 products round their operands to 10 bits of mantissa; fp32 forbids it. Restored after."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def blas_library(name: str | None) -> Iterator[None]:
    """The library that torch prefers, in this process; on ROCm the start value comes from TORCH_BLAS_PREFER_HIPBLASLT.

    Raises:
        AttributeError: this torch cannot choose.
    """
    if name is None:
        yield
        return
    choose = torch.backends.cuda.preferred_blas_library
    before = choose()
    choose(name)
    try:
        yield
    finally:
        choose(before)


def settings(dtype: str, library: str | None = None) -> AbstractContextManager[object]:
    """All of them together."""
    stack = ExitStack()
    stack.enter_context(fp32_precision(dtype))
    stack.enter_context(blas_library(library))
    return stack


def case_of(product: Product, dtype: str, call: str) -> Case:
    """One product as a case."""
    return Case(
        kind="gemm",
        variant=call,
        shape=product.shape,
        dtype=dtype,
        flop=product.flop,
        prepare=partial(prepare, product, dtype, call),
        within=partial(settings, dtype),
    )


def seed_products(*, small: bool) -> list[Product]:
    """The seven shapes, smallest first."""
    products = [Product(m=m, k=k, n=n) for m, k, n in SEED_SHAPES.values()]
    return sorted((product.shrunk() if small else product for product in products), key=lambda product: product.flop)


def seed_cases(dtypes: tuple[str, ...], *, small: bool) -> list[Case]:
    """Every shape under every call of its dtype."""
    return [
        case_of(product, dtype, call)
        for dtype in dtypes
        for product in seed_products(small=small)
        for call in (FP8_CALLS if dtype == "fp8" else CALLS)
    ]


def library_cases(platform: str, dtypes: tuple[str, ...], *, small: bool) -> list[Case]:
    """Each BLAS library that torch can choose here, at the seven shapes, in bf16."""
    return [
        replace(
            case_of(product, dtype, call),
            variant=f"{call} {LIBRARY_NAMES[platform, library]}",
            within=partial(settings, dtype, library),
        )
        for dtype in ("bf16",)
        if dtype in dtypes
        for library in LIBRARIES[platform]
        for product in seed_products(small=small)
        for call in CALLS
    ]


# The matrix products of the models that TPrimat trains, as one tensor-parallel rank runs them in a forward pass.

MODEL_KIND = "model_gemm"
MODEL_DTYPES = ("bf16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model under the splits that its strategies use."""

    model: str
    """Key under which it is shown."""
    shape: ModelShape
    tensor_parallel: tuple[int, ...] = (1, 2, 4)
    micro_batch: int = 4
    sequence: int = 2048


DEFAULT_WORKLOADS = (
    Workload(model="llama", shape=model_shape("llama-3.1-8b")),
    Workload(model="qwen", shape=model_shape("qwen-2.5-7b")),
)


def shrunk(workload: Workload) -> Workload:
    """For a processor."""
    return replace(workload, shape=tiny(workload.shape), micro_batch=1, sequence=64)


def workload_cases(workload: Workload, dtype: str) -> list[Case]:
    """Every matrix at every split."""
    call = FP8_CALLS[0] if dtype == "fp8" else "F.linear"
    found = []
    for ranks in workload.tensor_parallel:
        for matrix in gemm_shapes(workload.shape, workload.micro_batch, workload.sequence, ranks):
            product = Product(m=matrix.m, k=matrix.k, n=matrix.n)
            found.append(
                Case(
                    kind=MODEL_KIND,
                    variant=f"{workload.model} {matrix.name}",
                    shape={**product.shape, "tensor_parallel": ranks},
                    dtype=dtype,
                    flop=product.flop,
                    prepare=partial(prepare, product, dtype, call),
                    within=partial(settings, dtype),
                )
            )
    return found


def cases(workloads: tuple[Workload, ...], dtypes: tuple[str, ...], *, small: bool) -> list[Case]:
    """All models, in the dtypes that training uses."""
    return [
        case
        for dtype in MODEL_DTYPES
        if dtype in dtypes
        for workload in workloads
        for case in workload_cases(shrunk(workload) if small else workload, dtype)
    ]
