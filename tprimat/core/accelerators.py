"""Platforms and their backends, and the table of accelerators: which one a device name means, and how fast it multiplies.

An unknown name gives None, never another GPU. The rows are in tprimat/data/accelerators.yaml.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from os.path import commonprefix
from typing import Literal, get_args

from tprimat.core.rows import RefuseUnknownKeys, read_rows
from tprimat.core.units import GIBIBYTE
from tprimat.core.workload import FORMATS

PlatformName = Literal["nvidia", "amd", "cpu"]
Backend = Literal["cuda", "rocm", "cpu", "other"]
"""`other`: devices that nothing here runs on, whose logs are read all the same."""

BACKEND_OF: Mapping[PlatformName, Backend] = {"nvidia": "cuda", "amd": "rocm", "cpu": "cpu"}
PLATFORM_OF: Mapping[Backend, PlatformName] = {backend: platform for platform, backend in BACKEND_OF.items()}
SHORT_NAMES: Mapping[Backend, str] = {"cuda": "nvd", "rocm": "amd", "cpu": "cpu", "other": "other"}
"""What benchmark files write as their `platform`."""
BACKEND_OF_ANY_NAME: Mapping[str, Backend] = {
    **{name: backend for platform, backend in BACKEND_OF.items() for name in (backend, SHORT_NAMES[backend], platform)},
    "other": "other",
}
"""Every name that some result file uses for a platform -> backend."""


Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
USABLE_SHARE = 0.99
"""Of the memory as built, where a row gives no other figure; the driver keeps the rest (139.8 of 141 GiB on H200)."""
WITH_OWN_FP8 = frozenset({"MI300X", "MI300A", "MI325X"})
"""Accelerators (CDNA 3) whose matrix units take the 8-bit types e4m3fnuz and e5m2fnuz, not e4m3fn and e5m2 as others do
(ROCm documentation, data types and precision support)."""
MEMORY_SPREAD = 0.1
"""Of reports of the same memory, which may be in GB or GiB, with or without ECC."""
SERIES_WORDS = {"rtx", "radeon", "dgx", "hgx"}
BRAND_WORDS = {"nvidia", "amd", "tesla", "geforce", "instinct"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator(RefuseUnknownKeys):
    """The data sheet of one accelerator, as one device that torch sees.

    Peaks are those of matrix multiplication that accumulates in fp32, at the boost clock.
    """

    name: str
    """Unique, with the form factor where that changes the figures; chosen here."""
    vendor: Literal["NVIDIA", "AMD"]
    device_names: tuple[str, ...]
    """What torch.cuda.get_device_name, nvidia-smi, rocm-smi, amd-smi and rocminfo call it."""
    typed: tuple[str, ...] = ()
    """What people type instead, where several variants share it."""
    dense_flops: Mapping[Dtype, float]
    """dtype -> FLOP/s without structured sparsity; absent where the chip lacks the dtype."""
    boost_clock_hertz: float | None = None
    """At which the peaks are counted; a chip may run faster while it draws little power. None: not known."""
    sparse_flops: Mapping[Dtype, float] = field(default_factory=dict)
    """dtype -> FLOP/s with 2:4 sparsity as printed, to read figures that were divided by it; our own figures use dense peaks."""
    memory_bytes: int
    """Capacity as built, GiB behind the data sheet's GB."""
    reported_bytes: float | None = None
    """Of that, what torch reports where the driver and ECC keep over 1 %; None: they keep that much."""
    also_gib: tuple[float, ...] = ()
    """What it reports on some machines instead, GiB."""
    bandwidth_bytes_per_second: float
    tdp_watts: float
    """The highest board power that the data sheet allows."""
    link_bytes_per_second: float | None
    """To all other GPUs of the node together, both directions added as vendors do; PCIe where only pairs can be bridged."""
    link_peers: int | None = None
    """Where each pair of GPUs has links of its own, without a switch: the peers that share them. None: any group has all."""
    node_gpus: int = 8
    """In one node of the vendor's reference system."""
    link_gpus: int = 1
    """GPUs that switches of these links join across nodes; 1: those of a node only."""
    measured_flops: Mapping[Dtype, float] = field(default_factory=dict)
    """dtype -> the highest FLOP/s of a published matrix product, in short bursts."""
    network_bytes_per_second: float = 50e9
    """Of one GPU to other nodes, one direction, in the vendor's reference system: one adapter of 400 Gbit/s unless the row says
    otherwise."""
    source: str
    date: str | None

    @property
    def usable_bytes(self) -> int:
        """The memory that a program may use."""
        return round(self.reported_bytes or self.memory_bytes * USABLE_SHARE)

    @property
    def reported_sizes(self) -> tuple[float, ...]:
        """Every memory that torch reports, bytes."""
        return (self.usable_bytes, *(gib * GIBIBYTE for gib in self.also_gib))

    def may_have(self, memory_bytes: int) -> bool:
        """Return whether so much memory may be reported."""
        return any(abs(memory_bytes / size - 1) <= MEMORY_SPREAD for size in self.reported_sizes)

    @property
    def backend(self) -> Backend:
        """The software stack that drives it, as records name it."""
        return BACKEND_OF["nvidia" if self.vendor == "NVIDIA" else "amd"]


def multiplies(accelerator: Accelerator, precision: str) -> bool:
    """Return whether an accelerator multiplies in a precision: scales of blocks (MX, NVFP4) came with 4-bit products."""
    dtype, scaling = FORMATS.get(precision, (precision, None))
    return dtype in accelerator.dense_flops and (scaling not in {"mxfp8", "nvfp4", "mxfp4"} or "fp4" in accelerator.dense_flops)


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Return all accelerators of the table."""
    return read_rows("accelerators.yaml", "accelerators", Accelerator)


def find_accelerator(device_name: str | None) -> Accelerator | None:
    """Return the accelerator that a tool calls `device_name`, as a whole; None when the table does not hold it.

    A slice of a GPU ("... MIG 1g.10gb") and an architecture that several share ("gfx942") are not the GPU that they resemble.
    """
    return None if device_name is None else _by_spelling().get(_spelling(device_name))


def recorded_name(device_name: str, memory_bytes: int | None) -> str:
    """Return a device's name, with its memory where that is not its row's: a partition (MI300X in NPS4) is not the whole GPU."""
    known = find_accelerator(device_name)
    whole = known is None or not memory_bytes or known.may_have(memory_bytes)
    return device_name if whole else f"{device_name} of {(memory_bytes or 0) / GIBIBYTE:.0f} GiB"


def called(device_name: str | None) -> list[Accelerator]:
    """Return the accelerators that a name may mean: one whose name it is, else those whose names hold it (A100-SXM4)."""
    part = _spelling(device_name or "")
    holding = {one.name: one for name, one in _by_spelling().items() if part and f" {part} " in f" {name} "}
    exact = next((one for one in holding.values() if part in map(_spelling, (one.name, *one.device_names))), None)
    return [exact] if exact else list(holding.values())


def taken_as(name: str | None) -> str | None:
    """Return the full name where people typed a short one, such as H100 SXM for h100; None where it is no short one."""
    known, text = find_accelerator(name), name or ""
    if known is None or _spelling(text) not in map(_spelling, known.typed) or known.name.lower() == text.lower():
        return None
    return known.name


def resembling(device_name: str) -> list[Accelerator]:
    """Return the near relatives of a name: those whose names hold it, else those of its series (H, MI, RTX), nearest first."""
    part, (first, *_) = _spelling(device_name), [*_spelling(device_name).split(), ""]
    series = _series(part) if first in SERIES_WORDS or not first.isalpha() else set()  # TPU v5e is no relative of V100
    alike = [accelerator for accelerator in accelerators() if series & _series(_spelling(accelerator.name))]
    return called(device_name) or sorted(alike, key=lambda one: commonprefix([part, _spelling(one.name)]), reverse=True)  # noqa: RUF071 - no paths


def _series(spelling: str) -> set[str]:
    return set(re.findall(r"(?<![a-z0-9])([a-z]+)(?=\d)", spelling)) | ({"rtx"} & set(spelling.split()))


def peak_flops(device_name: str | None, dtype: str | None, *, sparse: bool = False) -> float | None:
    """Return the peak in FLOP/s of a device for a matmul dtype, or as printed with 2:4 sparsity; None when either is unknown."""
    accelerator = find_accelerator(device_name)
    peaks = {} if accelerator is None else accelerator.sparse_flops if sparse else accelerator.dense_flops
    return next((flops for name, flops in peaks.items() if name == dtype), None)


@cache
def _by_spelling() -> Mapping[str, Accelerator]:
    return {
        _spelling(name): accelerator
        for accelerator in accelerators()
        for name in (accelerator.name, *accelerator.device_names, *accelerator.typed)
    }


def _spelling(device_name: str) -> str:
    """Drop what differs between tools and driver versions (brands, case, punctuation); what is left tells GPUs apart."""
    words = device_name.lower().replace("-", " ").replace("_", " ").split()
    return " ".join(word for word in words if word not in BRAND_WORDS)
