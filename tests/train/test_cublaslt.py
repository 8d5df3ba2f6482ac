"""What cuBLASLt is asked for, computed on a CPU by a small library in C (small_cublaslt.c)."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tprimat.megatron import cublaslt, fp8


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to make a small cuBLASLt with")
    made, source = tmp_path / "small.so", Path(__file__).with_name("small_cublaslt.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", made, source, "-lm"], check=True)
    library, workspace = cublaslt.with_types(ctypes.CDLL(str(made))), torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", lambda _: ctypes.c_void_p(1))
    monkeypatch.setattr(cublaslt, "_workspace", lambda _: workspace)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=4711))
    cublaslt._prepare.cache_clear()
    yield
    cublaslt._prepare.cache_clear()


@pytest.mark.usefixtures("small_library")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("offset", [0, 16])
def test_8_bit_products_are_scaled_back_and_added_to_fp32(overwrite, offset):
    x, gradient = torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16() * 1e-6
    (a, _, a_scale), (b, _, b_scale) = fp8.convert(gradient, fp8.GRADIENT_DTYPE), fp8.convert(x, fp8.FORWARD_DTYPE)
    room = torch.empty(a.numel() + offset, dtype=torch.uint8)
    moved = room[offset:].view(a.dtype).view_as(a).copy_(a)
    total = torch.full((48, 32), torch.nan if overwrite else 1.0)
    cublaslt.accumulate(total, (moved, a_scale), (b, b_scale), overwrite=overwrite)
    expected = (a.float() * a_scale) @ (b.float() * b_scale).t()
    assert torch.allclose(total, expected if overwrite else 1 + expected, rtol=1e-4, atol=1e-9)
