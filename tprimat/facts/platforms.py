"""Platforms as config.yaml names them, backends as records name them, and the one map between the two."""

from collections.abc import Mapping
from typing import Literal

PlatformName = Literal["nvidia", "amd", "cpu"]
Backend = Literal["cuda", "rocm", "cpu"]

BACKEND_OF: Mapping[PlatformName, Backend] = {"nvidia": "cuda", "amd": "rocm", "cpu": "cpu"}
PLATFORM_OF: Mapping[Backend, PlatformName] = {backend: platform for platform, backend in BACKEND_OF.items()}
SHORT_NAMES: Mapping[Backend, Literal["nvd", "amd", "cpu"]] = {"cuda": "nvd", "rocm": "amd", "cpu": "cpu"}
"""What benchmark files write as their `platform`."""
BACKEND_OF_ANY_NAME: Mapping[str, Backend] = {
    name: backend for platform, backend in BACKEND_OF.items() for name in (backend, SHORT_NAMES[backend], platform)
}
"""Every name that some result file uses for a platform -> backend."""
