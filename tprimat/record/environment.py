"""Where a run took place: versions of installed packages, read without importing them, and the processor."""

import platform
from importlib import metadata
from pathlib import Path

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
    """Package -> version, of those that are installed, with Python and the operating system's kernel."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def processor_name() -> str:
    """The processor's model as Linux tells it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
