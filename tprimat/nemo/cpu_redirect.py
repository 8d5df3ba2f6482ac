"""What NeMo sends to CUDA on top of Megatron-Core, replaced where there is no GPU, so that its recipes can be tested."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel


def install() -> None:
    """Redirect; call after tprimat.train.cpu_redirect.install has answered True."""
    torch.cuda.stream = _same_stream  # type: ignore[assignment]
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = _NoStream  # type: ignore[assignment]
    from nemo.lightning import megatron_init

    seed_the_rest = megatron_init._set_random_seed

    def set_random_seed(seed: int) -> None:
        # NeMo leaves Megatron's generators out where it counts no CUDA device.
        seed_the_rest(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    megatron_init._set_random_seed = set_random_seed


class _NoStream:
    """Stands where a stream would; a CPU does one thing after the other."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""


def _same_stream(_: Any) -> AbstractContextManager[None]:
    return nullcontext()
