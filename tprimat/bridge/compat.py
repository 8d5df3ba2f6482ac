"""Every private name of Megatron-Bridge that its trainer replaces: most of them CUDA calls, where there is no GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.bridge.training import initialize, setup
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import token_dispatcher

from tprimat.train.compat import require

require("megatron-bridge", initialize, "_set_random_seed", ("seed_",))
require("megatron-bridge", initialize, "_warmup_jit_function", ())
require("megatron-bridge", setup, "initialize_megatron", ("cfg", "allow_no_cuda"))


def skip_dataset_helpers() -> None:
    """Compile no data set helpers of Megatron-Core: its wheel lacks the Makefile, and our sequences need none."""
    initialize.compile_helpers = lambda: None


def redirect_to_cpu() -> None:
    """Replace what Bridge sends to CUDA on top of Megatron-Core; call after `bootstrap.redirect_to_cpu` has returned True."""
    _replace_cuda()
    genuine = setup.initialize_megatron
    setup.initialize_megatron = lambda **arguments: genuine(allow_no_cuda=True, **arguments)
    initialize._warmup_jit_function = lambda *_, **__: None
    initialize._set_random_seed = _with_megatrons_generators(initialize._set_random_seed)
    token_dispatcher.maybe_move_tensor_to_cpu = _on_the_host


def _replace_cuda() -> None:
    """One function each, as torch's compiler wants it."""
    replacements: dict[str, Callable[..., Any]] = {
        "current_stream": lambda *_: _Nothing(),
        "default_stream": lambda *_: _Nothing(),
        "stream": lambda *_: nullcontext(),
        "set_device": lambda *_: None,
        "manual_seed_all": lambda _: None,
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_device_capability": lambda *_: (8, 0),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (0, 0),
        "memory_stats": lambda *_: {},
        "max_memory_allocated": lambda *_: 0,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _with_megatrons_generators(seed_the_rest: Callable[..., None]) -> Callable[..., None]:
    """Seed Megatron's generators, too: Bridge leaves them out where there is no CUDA device."""

    def seed_all(seed_: int, *arguments: Any, **named: Any) -> None:
        seed_the_rest(seed_, *arguments, **named)
        tensor_parallel.model_parallel_cuda_manual_seed(seed_)

    return seed_all


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _Nothing:
    """A stream or an event where there is none: a CPU does one thing after the other."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def query(self) -> bool:
        """What it stands for has always ended."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Nothing takes time."""
        return 0.0
