"""The software, processor and variables of this machine. Versions are read without importing the packages."""

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from tprimat import __version__

PACKAGES = (
    "torch",
    "megatron-core",
    "pytorch-lightning",
    "lightning",
    "nemo-toolkit",
    "transformer-engine",
    "torchao",
    "triton",
    "numpy",
    "torchtitan",
    "torchtune",
)

TUNING_VARIABLE = re.compile(
    r"(?:NCCL|RCCL|UCX|FI|CUDA|CUDNN|CUBLAS|CUBLASLT|NVTE|NVSHMEM|HIP|HIPBLASLT|ROCBLAS|ROCR|HSA|GPU|MIOPEN|TORCH|TORCHINDUCTOR"
    r"|PYTORCH|TRITON|KMP|MKL|MALLOC)_\w+"
)
"""Variables of libraries that communicate, multiply or allocate."""
OTHER_VARIABLE = re.compile(
    r"\w*(?:VISIBLE_DEVICES|VERSION\w*|HOME|PATH\w*|DIR|DIRECTORY|ROOT|FILE\w*|ARCH_LIST|IFNAME|HCA|DEBUG\w*|LOG\w*|TRACE\w*|FR_\w*"
    r"|DUMP\w*|KEY|TOKEN|SECRET|PASSWORD)"
)
"""Among these: which devices there are and where files are, what is printed, and secrets."""


@cache
def software_versions() -> dict[str, str]:
    """Return package -> version of the installed packages, with Python, the kernel and this program."""
    versions = {"python": platform.python_version(), "kernel": platform.release(), "tprimat": own_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def tuning_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that tune a run, such as NCCL_P2P_DISABLE=1, in alphabetical order."""
    names = (name for name in sorted(environment) if TUNING_VARIABLE.fullmatch(name) and not OTHER_VARIABLE.fullmatch(name))
    return {name: environment[name] for name in names}


@cache
def own_version() -> str:
    """Return the release and 12 digits of the SHA-256 of this package's sources."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return f"{__version__}+source.{digest.hexdigest()[:12]}"


def processor_name() -> str:
    """Return the processor's model as Linux names it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
