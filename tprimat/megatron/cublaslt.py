"""An 8-bit product added to an fp32 matrix by cuBLASLt itself, which torch cannot ask for.

The problem: weight gradients are summed in fp32 over micro-batches. torch's scaled product writes bf16 or fp32 and never adds
(`beta` is 0), so a second kernel reads the product and reads and writes the sum.

What is done: cublasLtMatmul is called through ctypes, from the library that torch has loaded, with C = D = the sum and
`beta` 1 (or 0 to overwrite). Descriptors and the algorithm that cuBLASLt suggests are found once for each shape.

cuBLASLt is column-major, in which a row-major matrix (rows, columns) is (columns, rows). D = total.T = b @ a.T in its terms: its
first operand is our second. 8-bit operands must be "TN": the summed dimension contiguous in both.

Names and numbers are those of cublasLt.h of CUDA 12 and 13 (docs.nvidia.com/cuda/cublas); a trial product in fp8.py decides
whether this is used.
"""

import ctypes
from ctypes import c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

CUDA_DTYPE = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
"""cudaDataType_t."""
COMPUTE_32F, SCALE_32F = 68, 0
TRANSPOSE_A, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUMULATION = 3, 17, 18, 25
"""cublasLtMatmulDescAttributes_t."""
MAX_WORKSPACE_BYTES = 1
"""cublasLtMatmulPreferenceAttributes_t."""
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
class PreparedProduct:
    """What cuBLASLt needs to know of one shape."""

    descriptor: c_void_p
    first: c_void_p
    second: c_void_p
    total: c_void_p
    heuristic: Heuristic


@cache
def library() -> Any:
    """Load the library that belongs to torch's CUDA.

    Raises:
        OSError: there is none.
    """
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or 'none').split('.')[0]}")


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
def _prepared(device: int, sizes: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> PreparedProduct:
    """Prepare the product of shapes (m, k) and (n, k), of these two dtypes."""
    (m, n, k), (a_dtype, b_dtype) = sizes, dtypes
    descriptor = c_void_p()
    _check(library().cublasLtMatmulDescCreate(ctypes.byref(descriptor), COMPUTE_32F, SCALE_32F))
    _set(descriptor, TRANSPOSE_A, c_int32(1))
    _set(descriptor, FAST_ACCUMULATION, c_int8(0))
    for pointer in (A_SCALE_POINTER, B_SCALE_POINTER):  # the choice of an algorithm asks whether there are scales
        _set(descriptor, pointer, c_void_p(_workspace(device).data_ptr()))
    first, second, total = _layout(b_dtype, k, n), _layout(a_dtype, k, m), _layout(torch.float32, n, m)
    preference = c_void_p()
    _check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    limit = c_uint64(WORKSPACE_BYTES)
    _check(library().cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE_BYTES, ctypes.byref(limit), c_size_t(8)))
    heuristic, found = Heuristic(), c_int()
    _check(
        library().cublasLtMatmulAlgoGetHeuristic(
            _handle(device), descriptor, first, second, total, total, preference, 1, ctypes.byref(heuristic), ctypes.byref(found)
        )
    )
    _check(library().cublasLtMatmulPreferenceDestroy(preference))
    if not found.value:
        raise RuntimeError("cuBLASLt knows no algorithm for this product")
    return PreparedProduct(descriptor, first, second, total, heuristic)


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
    device = total.device.index
    product = _prepared(device, (a.shape[0], b.shape[0], a.shape[1]), (a.dtype, b.dtype))
    _set(product.descriptor, A_SCALE_POINTER, c_void_p(b_scale.data_ptr()))
    _set(product.descriptor, B_SCALE_POINTER, c_void_p(a_scale.data_ptr()))
    alpha, beta = c_float(1), c_float(0 if overwrite else 1)
    sums, workspace = c_void_p(total.data_ptr()), _workspace(device)
    _check(
        library().cublasLtMatmul(
            _handle(device),
            product.descriptor,
            ctypes.byref(alpha),
            c_void_p(b.data_ptr()),
            product.first,
            c_void_p(a.data_ptr()),
            product.second,
            ctypes.byref(beta),
            sums,
            product.total,
            sums,
            product.total,
            ctypes.byref(product.heuristic),
            c_void_p(workspace.data_ptr()),
            c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream(device).cuda_stream),
        )
    )
