"""The form of an accelerator's entry; the entries stand in nvidia.py and amd.py, the look-up in accelerators.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]

DTYPES: tuple[Dtype, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8")

TERA = 1e12
GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """What the data sheet of one accelerator says, as one device that torch sees.

    Peaks are those of matrix multiplication that accumulates in fp32, at the boost clock.
    """

    name: str
    """Ours: unique, with the form factor where that changes the figures."""
    vendor: Literal["NVIDIA", "AMD"]
    device_names: tuple[str, ...]
    """What torch.cuda.get_device_name, nvidia-smi, rocm-smi, amd-smi or rocminfo call it."""
    dense_flops: Mapping[Dtype, float]
    """dtype -> FLOP/s without structured sparsity; absent where the chip lacks the dtype."""
    sparse_flops: Mapping[Dtype, float] = field(default_factory=dict)
    """dtype -> FLOP/s with 2:4 sparsity as printed, to read figures that were divided by it; never our own yardstick."""
    memory_bytes: int
    """Capacity as built, GiB behind the data sheet's GB; the driver keeps up to 1 % of it, ECC on GDDR6 a sixteenth."""
    bandwidth_bytes_per_second: float
    """Of the device memory."""
    tdp_watts: float
    """The highest board power that the data sheet allows."""
    link_bytes_per_second: float | None
    """To all other GPUs of the node together, both directions added as vendors do; PCIe where only pairs can be bridged."""
    source: str
    """Data sheet."""


def tera(**flops: float) -> dict[Dtype, float]:
    """TFLOP/s by dtype, as data sheets print them -> FLOP/s."""
    return {dtype: flops[dtype] * TERA for dtype in DTYPES if dtype in flops}
