"""What must happen before the first import of Megatron-Core: offer it a wgrad kernel; without a GPU, replace its CUDA calls.

Megatron-Core looks for the kernel, and decorates functions for the compiler, while it is imported.
"""

import os
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WGRAD_EXTENSION = "fused_weight_gradient_mlp_cuda"
"""Apex's extension module, which adds a weight's gradient straight into the fp32 buffer."""


def offer_wgrad_extension() -> None:
    """Offer the extension's two functions under its name, unless it is installed."""
    if WGRAD_EXTENSION in sys.modules or find_spec(WGRAD_EXTENSION):
        return
    sys.modules[WGRAD_EXTENSION] = module = types.ModuleType(WGRAD_EXTENSION)
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = _accumulate  # type: ignore[attr-defined]


def _accumulate(rows: Tensor, gradient: Tensor, total: Tensor) -> None:
    from tprimat.megatron.wgrad import accumulate_wgrad

    accumulate_wgrad(total, gradient, rows)


# Without a GPU: Megatron-Core names the CUDA device in about twenty lines. A TorchFunctionMode redirects the tensors that are
# created there; the few calls that are no torch functions are replaced.

CPU = torch.device("cpu")
_installed: list[TorchFunctionMode] = []


def redirect_to_cpu() -> bool:
    """Redirect CUDA calls to the CPU where neither CUDA nor HIP is present, and say so. A second call changes nothing."""
    if torch.cuda.is_available():
        return False
    if not _installed:
        _replace_calls()
        mode = _CudaToCpu()
        mode.__enter__()  # type: ignore[no-untyped-call]
        _installed.append(mode)
    return True


class _CudaToCpu(TorchFunctionMode):
    """Creates tensors on the CPU that are requested on a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            # Megatron's optimizer sorts parameters by names such as torch.cuda.FloatTensor.
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device | str):
        return str(device).startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


PAGED_STASH = "megatron.core.transformer.moe.paged_stash"
"""Since 0.18 imported with all of Megatron-Core. It imports Triton, which torch's CPU build lacks; nothing here calls it."""


def _replace_calls() -> None:
    # Compiling the fused element-wise helpers for a CPU takes minutes and gains nothing. Megatron-Core decorates them while it is
    # imported, and torch.compile looks at this variable then.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if find_spec("triton") is None:
        sys.modules[PAGED_STASH] = module = types.ModuleType(PAGED_STASH)
        module.__getattr__ = lambda _: None  # type: ignore[method-assign]
    import megatron.core.jit as megatron_jit

    megatron_jit.jit_fuser = lambda function: function
    # One function each: torch's compiler keeps a table of torch.cuda's functions and refuses an object that occurs in it twice.
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": lambda *_: None,
        "manual_seed": lambda _: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]
    from tprimat.megatron import compat

    compat.replace_set_cuda_rng_state(lambda state, *_, **__: torch.set_rng_state(state))
