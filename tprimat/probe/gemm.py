"""Matrix multiplication, the rate that bounds a training step: fixed shapes, and the models' own products.

A product of (m, k) and (k, n) counts 2 m n k floating-point operations. Operands are standard normal, because products of zeros
draw less power and run at a higher clock than training ever sees. fp8 products (e4m3, scales of one) use fast accumulation and
return bf16; casting to fp8 is not timed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

from tprimat.core.flops import gemm_shapes, seed_shapes
from tprimat.core.models import ModelShape, tiny
from tprimat.probe.case import Call, Case

CALLS = ("torch.matmul", "F.linear")
FP8_CALL = "scaled_mm tensor-wise"
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
"""In the order of measurement: what training uses comes first."""
NOT_ON_A_CPU = ("fp8", "tf32")
"""A processor has no tf32, and torch emulates fp8 products on it."""
TRAINED_DTYPES = ("bf16", "fp8")
TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Product:
    """One product: (m, k) times (k, n)."""

    m: int
    k: int
    n: int

    @property
    def flop(self) -> int:
        """One multiplication and one addition for each of m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def shape(self) -> dict[str, int]:
        """As in records."""
        return {"m": self.m, "k": self.k, "n": self.n}

    def shrunk(self) -> "Product":
        """Return the size for a processor: a 64th of each side, in multiples of 16, which fp8 kernels require."""
        return Product(*(max(16, side // 64 // 16 * 16) for side in (self.m, self.k, self.n)))

    def case(self, kind: str, variant: str, dtype: str, prepare: Callable[[torch.device], Call], **sizes: int) -> Case:
        """Return it as a case, whose record may have further sizes."""
        shape = {**self.shape, **sizes}
        return Case(kind=kind, variant=variant, shape=shape, dtype=dtype, flop=self.flop, prepare=prepare)


def fp8_dtype(*, gradient: bool = False) -> torch.dtype:
    """Return this GPU's e4m3 dtype, or e5m2 for gradients; those of gfx94x (MI300) shift the exponent and lack infinities."""
    name = torch.cuda.get_device_properties(0).gcnArchName if torch.cuda.is_available() and torch.version.hip else ""
    if name.startswith("gfx94"):
        return torch.float8_e5m2fnuz if gradient else torch.float8_e4m3fnuz
    return torch.float8_e5m2 if gradient else torch.float8_e4m3fn


def prepare(product: Product, dtype: str, call: str, device: torch.device) -> Call:
    """Return torch.matmul(a, b), b of shape (k, n), or F.linear(a, w), w of shape (n, k) as weights are stored."""
    if dtype == "fp8":
        return prepare_fp8(product, device)
    if dtype == "tf32" and device.type == "cpu":
        raise ValueError("a processor has no tf32")
    make = partial(torch.randn, device=device, dtype=TORCH_DTYPES[dtype])
    a = make(product.m, product.k)
    if call == "F.linear":
        return partial(functional.linear, a, make(product.n, product.k))
    return partial(torch.matmul, a, make(product.k, product.n))


def prepare_fp8(product: Product, device: torch.device, *, gradient: bool = False) -> Call:
    """Return torch._scaled_mm with one scale per operand; with a gradient as the first one, whose partial sums move to fp32."""
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    a, b = make(product.m, product.k).to(fp8_dtype(gradient=gradient)), make(product.n, product.k).to(fp8_dtype()).t()
    one = torch.ones((), device=device)
    return partial(torch._scaled_mm, a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=not gradient)


@contextmanager
def settings(dtype: str) -> Iterator[None]:
    """Let fp32 products round their operands to 10 bits of mantissa for tf32 alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def case_of(product: Product, dtype: str, call: str, *, kind: str = "gemm", variant: str | None = None, **more: int) -> Case:
    """Return one product as a case, under the name of the call or another one."""
    case = product.case(kind, variant or call, dtype, partial(prepare, product, dtype, call), **more)
    return replace(case, context=partial(settings, dtype))


def seed_cases(dtypes: Sequence[str], *, small: bool) -> list[Case]:
    """Return the seven fixed shapes, smallest first, with every call of each dtype."""
    products = [Product(*sides).shrunk() if small else Product(*sides) for sides in seed_shapes().values()]
    return [
        case_of(product, dtype, call)
        for dtype in dtypes
        for product in sorted(products, key=lambda product: product.flop)
        for call in ((FP8_CALL,) if dtype == "fp8" else CALLS)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProducts:
    """A model's matrix products as one tensor-parallel rank runs them in a forward pass."""

    model: str
    shape: ModelShape
    tensor_parallel: int
    micro_batch: int
    sequence: int


def model_cases(models: Sequence[ModelProducts], dtypes: Sequence[str], *, small: bool) -> list[Case]:
    """Return every matrix of every model, in the dtypes that training uses; small ones of tiny models."""
    cases = []
    for dtype in (dtype for dtype in TRAINED_DTYPES if dtype in dtypes):
        for of in models:
            shape, sequences, length = (tiny(of.shape), 1, 64) if small else (of.shape, of.micro_batch, of.sequence)
            for matrix in gemm_shapes(shape, sequences, length, of.tensor_parallel):
                product, call = Product(matrix.m, matrix.k, matrix.n), FP8_CALL if dtype == "fp8" else "F.linear"
                name = f"{of.model} {matrix.name}"
                cases.append(case_of(product, dtype, call, kind="model_gemm", variant=name, tensor_parallel=of.tensor_parallel))
    return cases
