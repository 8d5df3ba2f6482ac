"""Where a run took place: versions of installed packages, read without importing them, and the processor."""

import hashlib
import platform
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


def software_versions() -> dict[str, str]:
    """Package -> version, of those that are installed, with Python, the operating system's kernel and this program itself."""
    found = {"python": platform.python_version(), "kernel": platform.release(), "tprimat": own_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def own_version() -> str:
    """The release, and 12 digits of the SHA-256 of this package's sources: what a run or a probe ran."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return f"{__version__}+source.{digest.hexdigest()[:12]}"


def processor_name() -> str:
    """The processor's model as Linux tells it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
