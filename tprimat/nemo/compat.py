"""Every private name of NeMo that its trainer uses, checked at import; and replacements for its CUDA calls.

Megatron-Core's, torch's and Lightning's private names are in tprimat/megatron/compat.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from nemo.collections.llm.gpt.data import mock
from nemo.lightning import megatron_init

from tprimat.megatron.compat import require

require("nemo-toolkit", megatron_init, "_set_random_seed", ("seed_",))
MockDataset: Any = require("nemo-toolkit", mock, "_MockGPTDataset", ("tokenizer", "name", "num_samples", "seq_length", "seed"))
"""NeMo's mock sequences: item i of a data set is drawn from its seed + i."""


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's generators, on each pipeline stage differently, as NeMo does with its constant."""
    megatron_init._set_random_seed(seed)


def set_mock_datasets(module: Any, dataset: Any) -> None:
    """Give a MockDataModule its data set, for training, validation and test alike."""
    module._train_ds = module._validation_ds = module._test_ds = dataset


def redirect_to_cpu() -> None:
    """Replace what NeMo sends to CUDA on top of Megatron-Core; call after `bootstrap.redirect_to_cpu` has returned True."""
    torch.cuda.stream = _same_stream  # type: ignore[assignment]
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = _NoStream  # type: ignore[assignment]
    megatron_init._set_random_seed = _with_megatrons_generators(megatron_init._set_random_seed)


def _with_megatrons_generators(seed_the_rest: Callable[[int], None]) -> Callable[[int], None]:
    """Seed Megatron's generators, too: NeMo leaves them out where it counts no CUDA device."""

    def seed_all(seed_: int) -> None:
        seed_the_rest(seed_)
        tensor_parallel.model_parallel_cuda_manual_seed(seed_)

    return seed_all


class _NoStream:
    """A stream where there is none: a CPU does one thing after the other."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: there is nothing to wait for."""


def _same_stream(_: Any) -> AbstractContextManager[None]:
    return nullcontext()
