"""Products of 8-bit matrices added to fp32 sums by cuBLASLt itself: torch's scaled product never adds (its `beta` is 0).

cublasLtMatmul is called through ctypes, from the library that torch has loaded, with C = D = the sum. It is column-major, in
which a row-major matrix (rows, columns) is (columns, rows): D = total.T = b @ a.T, and its first operand is our second. 8-bit
operands must be "TN": the summed dimension contiguous in both. Names and numbers are those of cublasLt.h of CUDA 12 and 13
(docs.nvidia.com/cuda/cublas); a trial product in fp8.py decides whether this is used.
"""

import ctypes
from ctypes import c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

CUDA_DTYPE = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_32F, SCALE_32F = 68, 0
TRANSPOSE_A, TRANSPOSE_B, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUMULATION = 3, 4, 17, 18, 25
"""cublasLtMatmulDescAttributes_t."""
MAX_WORKSPACE_BYTES, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
"""cublasLtMatmulPreferenceAttributes_t; the alignments are those of both operands, of what is added and of the result."""
WORKSPACE_BYTES = 32 * 2**20
"""What NVIDIA recommends for Hopper."""
ZERO, ONE = c_float(0), c_float(1)

Scaled = tuple[Tensor, Tensor]
"""A matrix of 8-bit numbers, and the factor that undoes its scaling, fp32, shape ()."""


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Prepared(NamedTuple):
    """What cuBLASLt needs to know of one product."""

    descriptor: c_void_p
    first: c_void_p
    second: c_void_p
    total: c_void_p
    algorithm: Heuristic


@cache
def library() -> Any:
    """Load the library that belongs to torch's CUDA; OSError where there is none."""
    loaded = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or 'none').split('.')[0]}")
    # In the call that training makes ctypes takes plain numbers as addresses, so that the host makes no object for each.
    loaded.cublasLtMatmul.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]
    return loaded


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
    layout, sizes = c_void_p(), (c_uint64(rows), c_uint64(columns), c_int64(rows))
    _check(library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), CUDA_DTYPE[dtype], *sizes))
    return layout


@cache
def _prepare(device: int, sizes: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], alignment: int) -> Prepared:
    """Prepare total (m, n) += a (m, k) @ b.T (n, k) where all addresses are multiples of `alignment`."""
    (m, n, k), (a, b) = sizes, dtypes
    descriptor, preference = c_void_p(), c_void_p()
    _check(library().cublasLtMatmulDescCreate(ctypes.byref(descriptor), COMPUTE_32F, SCALE_32F))
    _set(descriptor, TRANSPOSE_A, c_int32(1))
    _set(descriptor, TRANSPOSE_B, c_int32(0))
    _set(descriptor, FAST_ACCUMULATION, c_int8(0))
    for pointer in (A_SCALE_POINTER, B_SCALE_POINTER):  # the choice of an algorithm asks whether there are scales
        _set(descriptor, pointer, c_void_p(_workspace(device).data_ptr()))
    first, second, total = _layout(b, k, n), _layout(a, k, m), _layout(torch.float32, n, m)
    _check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    wanted = {MAX_WORKSPACE_BYTES: c_uint64(WORKSPACE_BYTES), **dict.fromkeys(MIN_ALIGNMENTS, c_uint32(alignment))}
    for attribute, value in wanted.items():
        size = c_size_t(ctypes.sizeof(value))
        _check(library().cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), size))
    best, count = Heuristic(), c_int()
    _check(
        library().cublasLtMatmulAlgoGetHeuristic(
            _handle(device), descriptor, first, second, total, total, preference, 1, ctypes.byref(best), ctypes.byref(count)
        )
    )
    _check(library().cublasLtMatmulPreferenceDestroy(preference))
    if not count.value:
        raise RuntimeError("cuBLASLt knows no algorithm for this product")
    return Prepared(descriptor, first, second, total, best)


def accumulate(total: Tensor, first: Scaled, second: Scaled, *, overwrite: bool) -> None:
    """Total += first @ second.T, summed in fp32 throughout, or total = with `overwrite`, on the current stream.

    Shapes: (m, n) in fp32, (m, k) and (n, k), all contiguous, k a multiple of 16. RuntimeError: cuBLASLt refuses.
    """
    (a, a_scale), (b, b_scale) = first, second
    device, sums = total.device.index, total.data_ptr()
    addresses = sums | a.data_ptr() | b.data_ptr()
    alignment = 256 if addresses % 256 == 0 else 16 if addresses % 16 == 0 else 1
    known = _prepare(device, (a.shape[0], b.shape[0], a.shape[1]), (a.dtype, b.dtype), alignment)
    _set(known.descriptor, A_SCALE_POINTER, c_void_p(b_scale.data_ptr()))
    _set(known.descriptor, B_SCALE_POINTER, c_void_p(a_scale.data_ptr()))
    _check(
        library().cublasLtMatmul(
            _handle(device),
            known.descriptor,
            ctypes.byref(ONE),
            b.data_ptr(),
            known.first,
            a.data_ptr(),
            known.second,
            ctypes.byref(ZERO if overwrite else ONE),
            sums,
            known.total,
            sums,
            known.total,
            ctypes.byref(known.algorithm),
            _workspace(device).data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream(total.device).cuda_stream,
        )
    )
