"""Matrix multiplication, the rate that bounds a training step: fixed shapes, the models' own products, and a search.

A product of (m, k) and (k, n) counts 2 m n k floating-point operations. Operands are standard normal, because products of zeros
draw less power and run at a higher clock than training ever sees. fp8 products (e4m3, scales of one) use fast accumulation and
return bf16; casting to fp8 is not timed.

The search looks for the fastest product on this device: the ceiling for a training step. It is a coordinate scan. Starting from
the fastest fixed shape, each side in turn is tried at every length of a list while the other two stay; the fastest product is
kept, until a whole round brings no improvement or the time is spent. Every candidate is timed briefly and recorded (kind
gemm_search). The winner is then timed again at full effort and recorded as a gemm: the fastest of many brief timings is partly
luck, a fresh measurement is not.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch.nn import functional

from tprimat.core.effort import Effort
from tprimat.core.flops import SEED_SHAPES, gemm_shapes
from tprimat.core.models import ModelShape, tiny
from tprimat.probe.case import Bench, Call, Case, ProbeLog, measure, summary
from tprimat.records.schema import ProbeRecord

LIBRARIES = {"cuda": ("cublas", "cublaslt"), "rocm": ("cublas", "cublaslt"), "cpu": ()}
"""Arguments of torch.backends.cuda.preferred_blas_library. On ROCm these two mean rocBLAS and hipBLASLt."""
LIBRARY_NAMES = {
    ("cuda", "cublas"): "cuBLAS",
    ("cuda", "cublaslt"): "cuBLASLt",
    ("rocm", "cublas"): "rocBLAS",
    ("rocm", "cublaslt"): "hipBLASLt",
}
CALLS = ("torch.matmul", "F.linear")
FP8_CALLS = ("scaled_mm tensor-wise", "scaled_mm row-wise")
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
"""In the order of measurement: what training uses comes first."""
NOT_ON_A_CPU = ("fp8", "tf32")
"""A processor has no tf32, and torch emulates fp8 products on it."""
TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
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
        m, k, n = (max(16, side // 64 // 16 * 16) for side in (self.m, self.k, self.n))
        return Product(m=m, k=k, n=n)


def fp8_dtype(*, gradient: bool = False) -> torch.dtype:
    """Return the e4m3 dtype of this GPU, or e5m2 for gradients.

    gfx94x (MI300) has its own, with a shifted exponent and no infinities.
    """
    name = torch.cuda.get_device_properties(0).gcnArchName if torch.cuda.is_available() and torch.version.hip else ""
    if name.startswith("gfx94"):
        return torch.float8_e5m2fnuz if gradient else torch.float8_e4m3fnuz
    return torch.float8_e5m2 if gradient else torch.float8_e4m3fn


def plain_call(product: Product, dtype: str, call: str, device: torch.device) -> Call:
    """Return torch.matmul(a, b), b of shape (k, n), or F.linear(a, w), w of shape (n, k) as weights are stored."""
    if dtype == "tf32" and device.type == "cpu":
        raise ValueError("a processor has no tf32")
    a = torch.randn(product.m, product.k, device=device, dtype=TORCH_DTYPES[dtype])
    if call == "F.linear":
        return partial(functional.linear, a, torch.randn(product.n, product.k, device=device, dtype=a.dtype))
    return partial(torch.matmul, a, torch.randn(product.k, product.n, device=device, dtype=a.dtype))


def fp8_call(product: Product, call: str, device: torch.device) -> Call:
    """Return torch._scaled_mm with one scale per operand, or one per row of a and column of b."""
    dtype = fp8_dtype()
    a = torch.randn(product.m, product.k, device=device, dtype=torch.bfloat16).to(dtype)
    b = torch.randn(product.n, product.k, device=device, dtype=torch.bfloat16).to(dtype).t()
    rows, columns = ((product.m, 1), (1, product.n)) if call.endswith("row-wise") else ((), ())
    scale_a = torch.ones(rows, device=device, dtype=torch.float32)
    scale_b = torch.ones(columns, device=device, dtype=torch.float32)
    return partial(torch._scaled_mm, a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def prepare(product: Product, dtype: str, call: str, device: torch.device) -> Call:
    """Allocate the operands on the device and return the product as a call."""
    return fp8_call(product, call, device) if dtype == "fp8" else plain_call(product, dtype, call, device)


@contextmanager
def fp32_precision(dtype: str) -> Iterator[None]:
    """Allow fp32 products to round their operands to 10 bits of mantissa for tf32, and forbid it for all others."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def blas_library(name: str | None) -> Iterator[None]:
    """Set the library that torch prefers in this process; on ROCm the default comes from TORCH_BLAS_PREFER_HIPBLASLT.

    Raises:
        AttributeError: this torch has no such choice.
    """
    if name is None:
        yield
        return
    preferred = torch.backends.cuda.preferred_blas_library
    before = preferred()
    preferred(name)
    try:
        yield
    finally:
        preferred(before)


@contextmanager
def settings(dtype: str, library: str | None = None) -> Iterator[None]:
    """Combine precision and library."""
    with fp32_precision(dtype), blas_library(library):
        yield


def case_of(product: Product, dtype: str, call: str) -> Case:
    """Return one product as a case."""
    return Case(
        kind="gemm",
        variant=call,
        shape=product.shape,
        dtype=dtype,
        flop=product.flop,
        prepare=partial(prepare, product, dtype, call),
        context=partial(settings, dtype),
    )


def products_of(names: Iterable[str], *, small: bool) -> list[Product]:
    """Return some of the seven shapes by name."""
    products = (Product(m=m, k=k, n=n) for m, k, n in map(SEED_SHAPES.__getitem__, names))
    return [product.shrunk() if small else product for product in products]


def seed_products(*, small: bool) -> list[Product]:
    """Return the seven shapes, smallest first."""
    return sorted(products_of(SEED_SHAPES, small=small), key=lambda product: product.flop)


def seed_cases(dtypes: tuple[str, ...], *, small: bool) -> list[Case]:
    """Return every shape with every call of its dtype."""
    return [
        case_of(product, dtype, call)
        for dtype in dtypes
        for product in seed_products(small=small)
        for call in (FP8_CALLS if dtype == "fp8" else CALLS)
    ]


def library_cases(platform: str, dtypes: tuple[str, ...], *, small: bool) -> list[Case]:
    """Return the seven shapes in bf16 with each BLAS library that torch can select here."""
    return [
        replace(
            case_of(product, dtype, call),
            variant=f"{call} {LIBRARY_NAMES[platform, library]}",
            context=partial(settings, dtype, library),
        )
        for dtype in ("bf16",)
        if dtype in dtypes
        for library in LIBRARIES[platform]
        for product in seed_products(small=small)
        for call in CALLS
    ]


MODEL_KIND = "model_gemm"
MODEL_DTYPES = ("bf16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model's matrix products as one tensor-parallel rank runs them in a forward pass."""

    model: str
    """Key in the configuration."""
    shape: ModelShape
    tensor_parallel: tuple[int, ...]
    micro_batch: int
    sequence: int


def shrunk(workload: Workload) -> Workload:
    """Return the sizes for a processor."""
    return replace(workload, shape=tiny(workload.shape), micro_batch=1, sequence=64)


def workload_cases(workload: Workload, dtype: str) -> list[Case]:
    """Return every matrix at every tensor-parallel degree."""
    call = FP8_CALLS[0] if dtype == "fp8" else "F.linear"
    cases = []
    for ranks in workload.tensor_parallel:
        for matrix in gemm_shapes(workload.shape, workload.micro_batch, workload.sequence, ranks):
            product = Product(m=matrix.m, k=matrix.k, n=matrix.n)
            cases.append(
                Case(
                    kind=MODEL_KIND,
                    variant=f"{workload.model} {matrix.name}",
                    shape={**product.shape, "tensor_parallel": ranks},
                    dtype=dtype,
                    flop=product.flop,
                    prepare=partial(prepare, product, dtype, call),
                    context=partial(settings, dtype),
                )
            )
    return cases


def model_cases(workloads: tuple[Workload, ...], dtypes: tuple[str, ...], *, small: bool) -> list[Case]:
    """Return the products of all models, in the dtypes that training uses."""
    return [
        case
        for dtype in MODEL_DTYPES
        if dtype in dtypes
        for workload in workloads
        for case in workload_cases(shrunk(workload) if small else workload, dtype)
    ]


ROUNDS = 3
ROUND_SHAPES = ("square 8K", "square 16K", "feed-forward 1")
WARM_KIND, SUSTAINED_KIND = "gemm_warm", "gemm_sustained"
SUSTAINED_SECONDS = 10.0
"""Of full load before a sustained measurement: an H200 meets its power cap within one."""


def round_cases(dtypes: tuple[str, ...], *, small: bool) -> list[Case]:
    """Return some products in several rounds, warm and after sustained load: the same call, at other times of the device."""
    return [
        replace(
            case_of(product, dtype, search_call(dtype)),
            kind=kind,
            shape={**product.shape, "round": number},
            effort=Effort(loaded_seconds=loaded),
        )
        for number in range(1, ROUNDS + 1)
        for kind, loaded in ((WARM_KIND, None), (SUSTAINED_KIND, SUSTAINED_SECONDS))
        for dtype in MODEL_DTYPES
        if dtype in dtypes
        for product in products_of(ROUND_SHAPES, small=small)
    ]


SEARCH_KIND = "gemm_search"
SIDES = (1024, 2048, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 14336, 16384, 18432, 20480)
SMALL_SIDES = (64, 128, 256)
SEARCH_EFFORT = Effort(warmup=3, repetitions=10, seconds=0.2)
SEARCH_SECONDS = 12.0
SMALL_SEARCH_SECONDS = 1.0
SEARCHED_DTYPES = ("bf16", "fp8")
SEARCH_SUFFIX = "searched"


def search_call(dtype: str) -> str:
    """Return the call whose fastest shape is searched."""
    return FP8_CALLS[0] if dtype == "fp8" else "torch.matmul"


def candidate(product: Product, dtype: str) -> Case:
    """Return one product as a case that is timed briefly."""
    return replace(case_of(product, dtype, search_call(dtype)), kind=SEARCH_KIND, effort=SEARCH_EFFORT)


def rate(record: ProbeRecord) -> float:
    """Return FLOP/s; 0 for a product that was refused."""
    return (record.flop or 0) / median(record.seconds) if record.seconds else 0.0


def neighbours(product: Product, sides: tuple[int, ...]) -> Iterator[Product]:
    """Yield the products that differ from this one in one side."""
    for name in product.shape:
        for side in sides:
            yield replace(product, **{name: side})


def search(dtype: str, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Scan, then measure the winner again; return a known winner of this machine and software without a search."""
    found = known_winner(dtype, bench, log)
    if found or log.out_of_time:
        yield from (found,) if found else ()
        return
    sides = SMALL_SIDES if bench.small else SIDES
    deadline = time.monotonic() + (SMALL_SEARCH_SECONDS if bench.small else SEARCH_SECONDS)
    tried: dict[Product, float] = {}
    candidates = start_products(small=bench.small)
    best = before = None
    while best is None or (before != best and time.monotonic() < deadline):
        before = best
        for product in candidates:
            if product not in tried and (not tried or time.monotonic() < deadline):
                record = measure(candidate(product, dtype), bench)
                log.write(record)
                tried[product] = rate(record)
                yield record
        best = max(tried, key=lambda product: tried[product])
        candidates = list(neighbours(best, sides))
    yield from measure_winner(best, dtype, bench, log)


def start_products(*, small: bool) -> list[Product]:
    """Return the first candidates: the fixed shapes, so that the search never finds less than their table shows."""
    side = SMALL_SIDES[-1]
    return [Product(m=side, k=side, n=side)] if small else products_of(SEED_SHAPES, small=False)


def measure_winner(best: Product, dtype: str, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Measure the best product again, at full effort."""
    case = replace(case_of(best, dtype, search_call(dtype)), variant=f"{search_call(dtype)} {SEARCH_SUFFIX}")
    record = measure(case, bench)
    log.write(record)
    log.tell(f"{case.title}: {record.error or summary(record)}")
    yield record


def known_winner(dtype: str, bench: Bench, log: ProbeLog) -> ProbeRecord | None:
    """Return the result of an earlier search."""
    variant = f"{search_call(dtype)} {SEARCH_SUFFIX}"
    for record in log.known.values():
        if (record.variant, record.dtype, record.machine, record.software) == (variant, dtype, bench.machine, bench.software):
            return record
    return None
