"""Lets Megatron-Core run where there is no GPU: what it sends to CUDA unconditionally goes to the CPU instead.

Megatron-Core 0.15 and 0.16 name the CUDA device in about twenty lines (recurrent ones: the RNG tracker, the gather and
scatter mappings, pipeline receive buffers, gradient buffers). A TorchFunctionMode redirects the factories; the few calls
that are not torch functions are replaced. Does nothing where CUDA or HIP is present, and nothing the second time.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_installed: list[TorchFunctionMode] = []


def install() -> bool:
    """Redirect, once; call before the first import of megatron.core.

    Returns:
        whether this process is redirected.
    """
    if torch.cuda.is_available():
        return False
    if not _installed:
        _replace_calls()
        mode = _CudaToCpu()
        mode.__enter__()  # type: ignore[no-untyped-call]
        _installed.append(mode)
    return True


class _CudaToCpu(TorchFunctionMode):
    """Tensors asked for on a CUDA device are made on the CPU."""

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
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _replace_calls() -> None:
    # Compiling the fused element-wise helpers for a CPU costs minutes and gains nothing. megatron.core decorates them
    # while it is imported, and torch.compile looks at this variable then.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import megatron.core.jit as megatron_jit

    megatron_jit.jit_fuser = lambda function: function
    # One function each: torch._dynamo keeps a table of torch.cuda's functions and refuses an object that stands in it twice.
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda _: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
