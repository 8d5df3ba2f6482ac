"""Which software a run used: versions of installed packages, read without importing them."""

import platform
from importlib import metadata

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
