"""Look at everything that a run needs, before one fails for lack of it."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tprimat.core.accelerators import PLATFORM_OF
from tprimat.core.rows import read_rows
from tprimat.engines import ENGINE_NAMES, FALLBACK
from tprimat.engines.base import Here, engine_named
from tprimat.hardware.health import Check, machine_checks
from tprimat.hardware.nodes import this_machine
from tprimat.records.environment import package_version

TORCH_PROGRAM = """
import json, torch
cuda = torch.cuda.is_available()
nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else None
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
                  "devices": torch.cuda.device_count() if cuda else 0, "nccl": nccl}))
"""
IMPORT_SECONDS = 120.0
"""For a first import from a network file system."""
INSTALL = "make install, or pip install -r requirements.txt"
TRAINING = (("Megatron-Core", ("megatron-core",)), ("Lightning", ("pytorch-lightning", "lightning")))
"""What the embedded engine needs besides torch: name, and the packages of which it needs one."""
CUDA_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
STACK = ("torch", "megatron-core", "megatron-bridge", "nemo-toolkit", "transformer-engine", "torchtitan", *CUDA_LIBRARIES)
CONTAINER = {"NVIDIA_PYTORCH_VERSION": "nvcr.io/nvidia/pytorch", "CUBLAS_VERSION": "cuBLAS", "NCCL_VERSION": "NCCL"}
"""Variables that NVIDIA's containers set, whose libraries are no packages of pip -> of what they are the version."""


def examine(output: Path, primus_path: str | None = None) -> tuple[list[Check], bool]:
    """Look at software and machine.

    Returns:
        the checks in the order in which a reader wants them, and whether some engine can train here.
    """
    machine = this_machine()
    python = Check("Python", "ok", f"{platform.python_version()} at {sys.executable}")
    torch = check_torch(ask_torch(), machine.platform if machine else None)
    packages = [check_package(name, distributions) for name, distributions in TRAINING]
    here = Here(platform=PLATFORM_OF[machine.platform] if machine else "cpu", primus_path=primus_path)
    engines = list(check_engines(here))
    embedded = all(check.status == "ok" for check in (torch, *packages))
    checks = [python, torch, *packages, check_stack(), *engines, *machine_checks(output)]
    return checks, embedded or any(engine.status == "ok" for engine in engines)


def ask_torch() -> Mapping[str, Any] | str:
    """Return what torch says of itself, imported in another process; or one line about what went wrong."""
    if find_spec("torch") is None:
        return "not installed"
    try:
        command = [sys.executable, "-c", TORCH_PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return f"not imported within {IMPORT_SECONDS:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    answer: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check_torch(answer: Mapping[str, Any] | str, gpus: str | None) -> Check:
    """Say for what torch is built, and whether it sees the GPUs."""
    if isinstance(answer, str):
        return Check("torch", "problem", answer, INSTALL)
    built = "rocm" if answer["hip"] else "cuda" if answer["cuda"] else None
    build = {"rocm": f"ROCm {answer['hip']}", "cuda": f"CUDA {answer['cuda']}", None: "CPUs"}[built]
    library = f", {'RCCL' if answer['hip'] else 'NCCL'} {'.'.join(map(str, answer['nccl']))}" if answer["nccl"] else ""
    finding = f"{answer['version']}, built for {build}{library}"
    if gpus and built != gpus:
        fix = f"{sys.executable} -m pip uninstall torch, then make install" + (" TORCH=rocm7.2" if gpus == "rocm" else "")
        return Check("torch", "problem", f"{finding}, but the GPUs need {gpus}", fix)
    if gpus and not answer["devices"]:
        fix = "nvidia-smi or rocm-smi shows the driver's version; a driver older than torch's build must be updated"
        return Check("torch", "problem", f"{finding}, which does not see the GPUs", fix)
    return Check("torch", "ok", finding + (f", sees {answer['devices']} GPUs" if gpus else ""))


def check_package(name: str, distributions: Sequence[str]) -> Check:
    """Look for one of the packages that training needs."""
    if version := next(filter(None, map(package_version, distributions)), None):
        return Check(name, "ok", version)
    return Check(name, "problem", "not installed", INSTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStack:
    """A row of data/stacks.yaml."""

    name: str
    versions: dict[str, str]
    source: str


def check_stack() -> Check:
    """Name the installed packages that trainings run on, and the known set of versions that they are."""
    installed = {name: version for name in STACK if (version := package_version(name)) is not None}
    container = {name: os.environ[variable] for variable, name in CONTAINER.items() if variable in os.environ}
    finding = ", ".join(f"{name} {version}" for name, version in {**container, **installed}.items()) or "nothing"
    short = {name: ".".join(version.split(".")[:2]) for name, version in installed.items()}
    for stack in read_rows("stacks.yaml", "stacks", KnownStack):
        if stack.versions.items() <= short.items():
            return Check("stack", "ok", f"{finding}; the versions of {stack.name}")
    unknown = f"{finding}; not a set of versions known to TPrimat"
    return Check("stack", "absent", unknown, "docs/engines.md lists known ones under Versions")


def check_engines(here: Here) -> Iterator[Check]:
    """Ask every engine that needs its own framework whether it can start."""
    for engine in (engine_named(name) for name in ENGINE_NAMES if name != FALLBACK):
        answer, name = engine.available(here), f"engine {engine.name}"
        if isinstance(answer, str):
            yield Check(name, "ok", answer)
        else:
            yield Check(name, "absent", answer.what.removesuffix("."), answer.fix)
