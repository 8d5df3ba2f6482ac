"""Products by cuBLASLt itself, for what torch does not offer: adding an 8-bit product to fp32, and choosing the algorithm.

The problem: weight gradients are summed in fp32 over micro-batches. torch's scaled product writes bf16 or fp32 and never adds
(`beta` is 0), so a second kernel reads the product and reads and writes the sum.

What is done: cublasLtMatmul is called through ctypes, from the library that torch has loaded, with C = D = the sum and
`beta` 1 (or 0 to overwrite). Descriptors and the algorithms that cuBLASLt suggests are found once for each product.
tuned_products.py lets training choose among them, and benchmarks/product_algorithms.py times them all.

cuBLASLt is column-major, in which a row-major matrix (rows, columns) is (columns, rows). D = total.T = b.T @ a.T in its terms:
its first operand is our second. 8-bit operands must be "TN": the summed dimension contiguous in both.

Names and numbers are those of cublasLt.h of CUDA 12 and 13 (docs.nvidia.com/cuda/cublas); trial products in fp8.py and
tuned_products.py decide whether this is used.
"""

import ctypes
from ctypes import c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

CUDA_DTYPE = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
"""cudaDataType_t."""
COMPUTE_32F, SCALE_32F = 68, 0
TRANSPOSE_A, TRANSPOSE_B, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUMULATION = 3, 4, 17, 18, 25
"""cublasLtMatmulDescAttributes_t."""
MAX_WORKSPACE_BYTES, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
"""cublasLtMatmulPreferenceAttributes_t; the alignments are those of both operands, of what is added and of the result."""
WORKSPACE_BYTES = 32 * 2**20
"""What NVIDIA recommends for Hopper."""


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True)
class Product:
    """What a product is, without its contents: total (m, n) = a @ b, each operand as it is stored."""

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    total: torch.dtype
    a_transposed: bool = False
    """`a` is stored as (k, m), else (m, k)."""
    b_transposed: bool = True
    """`b` is stored as (n, k), else (k, n)."""
    scaled: bool = False
    """Both operands have a factor, as 8-bit ones do."""
    fast: bool = False
    """Sum 8-bit products in the matrix unit's own precision."""


@dataclass(frozen=True)
class PreparedProduct:
    """What cuBLASLt needs to know of one product."""

    descriptor: c_void_p
    first: c_void_p
    second: c_void_p
    total: c_void_p
    algorithms: tuple[Heuristic, ...]
    """What it suggests, best first."""
    handle: c_void_p
    workspace: int
    """Its address."""


@cache
def library() -> Any:
    """Load the library that belongs to torch's CUDA.

    Raises:
        OSError: there is none.
    """
    return with_types(ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or 'none').split('.')[0]}"))


def with_types(found: Any) -> Any:
    """Let ctypes take plain numbers as addresses in the call that training makes, so that the host makes no object for each."""
    found.cublasLtMatmul.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]
    return found


def alignment_of(*tensors: Tensor | None) -> int:
    """Return the bytes that all addresses are multiples of, as far as algorithms care: 256, 16 or 1. None is a tensor to come."""
    addresses = 0
    for tensor in tensors:
        addresses |= 0 if tensor is None else tensor.data_ptr()
    return 256 if addresses % 256 == 0 else 16 if addresses % 16 == 0 else 1


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(handle)))
    return handle


@cache
def _workspace(device: int) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


@cache
def _number(value: float) -> c_float:
    return c_float(value)


def _set(descriptor: c_void_p, attribute: int, value: Any) -> None:
    _check(library().cublasLtMatmulDescSetAttribute(descriptor, attribute, ctypes.byref(value), c_size_t(ctypes.sizeof(value))))


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """Describe a column-major matrix without gaps."""
    layout = c_void_p()
    _check(
        library().cublasLtMatrixLayoutCreate(
            ctypes.byref(layout), CUDA_DTYPE[dtype], c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
    )
    return layout


@cache
def prepare(device: int, product: Product, most: int = 1, alignment: int = 256) -> PreparedProduct:
    """Prepare a product, with up to `most` algorithms that can compute it where all addresses are multiples of `alignment`.

    Raises:
        RuntimeError: cuBLASLt knows none.
    """
    descriptor = c_void_p()
    _check(library().cublasLtMatmulDescCreate(ctypes.byref(descriptor), COMPUTE_32F, SCALE_32F))
    _set(descriptor, TRANSPOSE_A, c_int32(product.b_transposed))
    _set(descriptor, TRANSPOSE_B, c_int32(product.a_transposed))
    if product.scaled:
        _set(descriptor, FAST_ACCUMULATION, c_int8(product.fast))
        for pointer in (A_SCALE_POINTER, B_SCALE_POINTER):  # the choice of an algorithm asks whether there are scales
            _set(descriptor, pointer, c_void_p(_workspace(device).data_ptr()))
    m, n, k = product.m, product.n, product.k
    first = _layout(product.b, *((k, n) if product.b_transposed else (n, k)))
    second = _layout(product.a, *((m, k) if product.a_transposed else (k, m)))
    total = _layout(product.total, n, m)
    preference = c_void_p()
    _check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    wanted = {MAX_WORKSPACE_BYTES: c_uint64(WORKSPACE_BYTES), **dict.fromkeys(MIN_ALIGNMENTS, c_uint32(alignment))}
    for attribute, value in wanted.items():
        size = c_size_t(ctypes.sizeof(value))
        _check(library().cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), size))
    found, count = (Heuristic * most)(), c_int()
    _check(
        library().cublasLtMatmulAlgoGetHeuristic(
            _handle(device), descriptor, first, second, total, total, preference, most, found, ctypes.byref(count)
        )
    )
    _check(library().cublasLtMatmulPreferenceDestroy(preference))
    if not count.value:
        raise RuntimeError("cuBLASLt knows no algorithm for this product")
    algorithms = tuple(found[: count.value])
    return PreparedProduct(descriptor, first, second, total, algorithms, _handle(device), _workspace(device).data_ptr())


Scaled = tuple[Tensor, Tensor]
"""A matrix of 8-bit numbers, and the factor that undoes its scaling, fp32, shape ()."""


def accumulate(total: Tensor, first: Scaled, second: Scaled, *, overwrite: bool) -> None:
    """Total += first @ second.T, summed in fp32 throughout; or total = with `overwrite`.

    Args:
        total: shape (m, n), contiguous fp32, on the device of all others.
        first: shape (m, k), contiguous; k a multiple of 16.
        second: shape (n, k), likewise.
        overwrite: the old contents of `total` are not read.

    Raises:
        RuntimeError: cuBLASLt refuses.
    """
    (a, a_scale), (b, b_scale) = first, second
    product = Product(a.shape[0], b.shape[0], a.shape[1], a.dtype, b.dtype, total.dtype, scaled=True)
    prepared = prepare(total.device.index, product, alignment=alignment_of(total, a, b))
    set_scales(prepared, a_scale, b_scale)
    run(prepared, total, (a, b), beta=0 if overwrite else 1)


def set_scales(prepared: PreparedProduct, a_scale: Tensor, b_scale: Tensor) -> None:
    """Set the factors that undo the scaling of both operands, each fp32 of shape ()."""
    _set(prepared.descriptor, A_SCALE_POINTER, c_void_p(b_scale.data_ptr()))
    _set(prepared.descriptor, B_SCALE_POINTER, c_void_p(a_scale.data_ptr()))


def run(  # noqa: PLR0913 - a product has this many parts
    prepared: PreparedProduct,
    total: Tensor,
    operands: tuple[Tensor, Tensor],
    *,
    choice: int = 0,
    alpha: float = 1,
    beta: float = 0,
) -> None:
    """Total = alpha a @ b + beta total, by one of a prepared product's algorithms, on the current stream.

    Raises:
        RuntimeError: cuBLASLt refuses.
    """
    (a, b), sums = operands, total.data_ptr()
    _check(
        library().cublasLtMatmul(
            prepared.handle,
            prepared.descriptor,
            ctypes.byref(_number(alpha)),
            b.data_ptr(),
            prepared.first,
            a.data_ptr(),
            prepared.second,
            ctypes.byref(_number(beta)),
            sums,
            prepared.total,
            sums,
            prepared.total,
            ctypes.byref(prepared.algorithms[choice]),
            prepared.workspace,
            WORKSPACE_BYTES,
            torch.cuda.current_stream(total.device).cuda_stream,
        )
    )
