"""Matrix multiplication, the rate that bounds a training step: fixed shapes, the models' own products, and a search.

A product of (m, k) and (k, n) counts 2 m n k floating-point operations. Operands are standard normal, because products of zeros
draw less power and run at a higher clock than training ever sees. fp8 products (e4m3, scales of one) use fast accumulation and
return bf16; casting to fp8 is not timed.

The search for the fastest product, the ceiling of a training step, is a coordinate scan with brief timings (kind gemm_search).
Its winner is timed again at full effort and recorded as a gemm: the fastest of many brief timings is partly luck.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch.nn import functional

from tprimat.core.flops import SEED_SHAPES, gemm_shapes
from tprimat.core.models import ModelShape, tiny
from tprimat.probe.case import Bench, Call, Case, Effort, ProbeLog, summary
from tprimat.records.schema import ProbeRecord

CALLS = ("torch.matmul", "F.linear")
FP8_CALLS = ("scaled_mm tensor-wise", "scaled_mm row-wise")
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
    """Return the e4m3 dtype of this GPU, or e5m2 for gradients.

    gfx94x (MI300) has its own, with a shifted exponent and no infinities.
    """
    name = torch.cuda.get_device_properties(0).gcnArchName if torch.cuda.is_available() and torch.version.hip else ""
    if name.startswith("gfx94"):
        return torch.float8_e5m2fnuz if gradient else torch.float8_e4m3fnuz
    return torch.float8_e5m2 if gradient else torch.float8_e4m3fn


def prepare(product: Product, dtype: str, call: str, device: torch.device) -> Call:
    """Return torch.matmul(a, b), b of shape (k, n), or F.linear(a, w), w of shape (n, k) as weights are stored."""
    if dtype == "fp8":
        return prepare_fp8(product, call, device)
    if dtype == "tf32" and device.type == "cpu":
        raise ValueError("a processor has no tf32")
    make = partial(torch.randn, device=device, dtype=TORCH_DTYPES[dtype])
    a = make(product.m, product.k)
    if call == "F.linear":
        return partial(functional.linear, a, make(product.n, product.k))
    return partial(torch.matmul, a, make(product.k, product.n))


def prepare_fp8(product: Product, call: str, device: torch.device) -> Call:
    """Return torch._scaled_mm with one scale per operand, or one per row of a and column of b."""
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    a, b = make(product.m, product.k).to(fp8_dtype()), make(product.n, product.k).to(fp8_dtype()).t()
    rows, columns = ((product.m, 1), (1, product.n)) if call.endswith("row-wise") else ((), ())
    one, other = torch.ones(rows, device=device), torch.ones(columns, device=device)
    return partial(torch._scaled_mm, a, b, one, other, out_dtype=torch.bfloat16, use_fast_accum=True)


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


def products_of(names: Iterable[str], *, small: bool) -> list[Product]:
    """Return some of the seven shapes by name."""
    products = (Product(*SEED_SHAPES[name]) for name in names)
    return [product.shrunk() if small else product for product in products]


def seed_products(*, small: bool) -> list[Product]:
    """Return the seven shapes, smallest first."""
    return sorted(products_of(SEED_SHAPES, small=small), key=lambda product: product.flop)


def seed_cases(dtypes: Sequence[str], *, small: bool) -> list[Case]:
    """Return every shape with every call of its dtype."""
    return [
        case_of(product, dtype, call)
        for dtype in dtypes
        for product in seed_products(small=small)
        for call in (FP8_CALLS if dtype == "fp8" else CALLS)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProducts:
    """A model's matrix products as one tensor-parallel rank runs them in a forward pass."""

    model: str
    """Key in the configuration."""
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
                product, call = Product(matrix.m, matrix.k, matrix.n), FP8_CALLS[0] if dtype == "fp8" else "F.linear"
                name = f"{of.model} {matrix.name}"
                cases.append(case_of(product, dtype, call, kind="model_gemm", variant=name, tensor_parallel=of.tensor_parallel))
    return cases


ROUNDS = 3
ROUND_SHAPES = ("square 8K", "square 16K", "feed-forward 1")
SUSTAINED_SECONDS = 10.0
"""Of full load before a sustained measurement: an H200 meets its power cap within one."""


def round_cases(dtypes: Sequence[str], *, small: bool) -> list[Case]:
    """Return some products in several rounds, warm and after sustained load: the same call, at other times of the device."""
    return [
        replace(case_of(product, dtype, search_call(dtype), kind=kind, round=number), effort=Effort(loaded_seconds=loaded))
        for number in range(1, ROUNDS + 1)
        for kind, loaded in (("gemm_warm", None), ("gemm_sustained", SUSTAINED_SECONDS))
        for dtype in TRAINED_DTYPES
        if dtype in dtypes
        for product in products_of(ROUND_SHAPES, small=small)
    ]


SIDES = (1024, 2048, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 14336, 16384, 18432, 20480)
SMALL_SIDES = (64, 128, 256)
SEARCH_EFFORT = Effort(warmup=3, repetitions=10, seconds=0.2)
SEARCH_SECONDS, SMALL_SEARCH_SECONDS = 12.0, 1.0


def search_call(dtype: str) -> str:
    """Return the call whose fastest shape is searched."""
    return FP8_CALLS[0] if dtype == "fp8" else "torch.matmul"


def rate(record: ProbeRecord) -> float:
    """Return FLOP/s; 0 for a product that was refused."""
    return (record.flop or 0) / median(record.seconds) if record.seconds else 0.0


def search(dtype: str, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Scan, then measure the winner again; return a known winner of this machine and software without a search.

    The scan begins with the fixed shapes, so that it never finds less than their table shows.
    """
    call = search_call(dtype)
    name = f"{call} searched"
    for record in log.known.values():
        if (record.variant, record.dtype, record.machine, record.software) == (name, dtype, bench.machine, bench.software):
            yield record
            return
    sides = SMALL_SIDES if bench.small else SIDES
    deadline = time.monotonic() + (SMALL_SEARCH_SECONDS if bench.small else SEARCH_SECONDS)
    tried: dict[Product, float] = {}
    candidates = [Product(*3 * SMALL_SIDES[-1:])] if bench.small else products_of(SEED_SHAPES, small=False)
    best = before = None
    while best is None or (before != best and time.monotonic() < deadline):
        before = best
        for product in candidates:
            if product not in tried and (not tried or time.monotonic() < deadline):
                case = replace(case_of(product, dtype, call, kind="gemm_search"), effort=SEARCH_EFFORT)
                record = log.add(case, bench)
                tried[product] = rate(record)
                yield record
        best = max(tried, key=lambda product: tried[product])
        candidates = [replace(best, **{side: length}) for side in best.shape for length in sides]
    case = case_of(best, dtype, call, variant=name)
    record = log.add(case, bench)
    log.tell(f"{case.title}: {record.error or summary(record)}")
    yield record
