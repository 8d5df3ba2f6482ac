"""Which accelerator a device name means, and how fast it can multiply. An unknown name gives None, never another GPU."""

from collections.abc import Mapping
from types import MappingProxyType

from tprimat.facts.accelerator import DTYPES, Accelerator, Dtype
from tprimat.facts.amd import AMD
from tprimat.facts.nvidia import NVIDIA

__all__ = ["ACCELERATORS", "DTYPES", "Accelerator", "Dtype", "find_accelerator", "peak_dense_flops", "peak_sparse_flops"]

ACCELERATORS: tuple[Accelerator, ...] = NVIDIA + AMD

BRAND_WORDS = {"nvidia", "amd", "tesla", "geforce", "instinct"}


def spelling(device_name: str) -> str:
    """Brands, case and punctuation differ between tools and driver versions; what is left tells one GPU from another."""
    words = device_name.lower().replace("-", " ").replace("_", " ").split()
    return " ".join(word for word in words if word not in BRAND_WORDS)


def _index() -> Mapping[str, Accelerator]:
    found: dict[str, Accelerator] = {}
    for accelerator in ACCELERATORS:
        for name in (accelerator.name, *accelerator.device_names):
            found[spelling(name)] = accelerator
    return MappingProxyType(found)


_BY_SPELLING = _index()


def find_accelerator(device_name: str | None) -> Accelerator | None:
    """The accelerator that a tool calls `device_name`, or None when the table does not hold it.

    Names must agree whole: a slice of a GPU ("... MIG 1g.10gb"), a sibling ("MI308X") or an architecture ("gfx942",
    which MI300X, MI300A and MI325X share) is not the GPU whose name it resembles.
    """
    return None if device_name is None else _BY_SPELLING.get(spelling(device_name))


def peak_dense_flops(device_name: str | None, dtype: str | None) -> float | None:
    """Dense peak in FLOP/s of a device for a matmul dtype (a key of DTYPES); None when either is unknown or unsupported."""
    accelerator = find_accelerator(device_name)
    return None if accelerator is None else _of_dtype(accelerator.dense_flops, dtype)


def peak_sparse_flops(device_name: str | None, dtype: str | None) -> float | None:
    """The printed peak with 2:4 sparsity, to read figures that were divided by it; None where there is none."""
    accelerator = find_accelerator(device_name)
    return None if accelerator is None else _of_dtype(accelerator.sparse_flops, dtype)


def _of_dtype(peaks: Mapping[Dtype, float], dtype: str | None) -> float | None:
    return next((flops for name, flops in peaks.items() if name == dtype), None)
