"""The software, processor and variables of this machine. Versions are read without importing the packages."""

import hashlib
import os
import platform
import re
import socket
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from tprimat import __version__
from tprimat.core.rows import DATA, document
from tprimat.records.schema import Machine, NodeRecord

TABLE: Mapping[str, list[str]] = document(DATA / "variables.yaml")
LIBRARY_VARIABLE = re.compile(rf"(?:{'|'.join(TABLE['libraries'])})_\w+|{'|'.join(TABLE['library_variables'])}")
"""Variables of libraries that communicate, multiply, compile or allocate."""
NO_TUNING = re.compile(rf"\w*(?:_|^)(?:{'|'.join(TABLE['no_tuning'])})(?:_\w*)?|{'|'.join(TABLE['no_tuning_variables'])}")
"""Among these: which devices there are, where files are, what is printed, versions, and what differs from job to job."""
SECRET = "|".join(TABLE["secrets"])
SECRET_NAME = re.compile(rf"(?:[\w.-]*[_.-])?(?:{SECRET}|key|pass|pwd|auth)", re.I)
"""Names of values that nobody else may see."""
PLAIN_VALUE = re.compile(r"[\w.,:;+~^=-]{0,60}|\[value [0-9a-f]{8}\]", re.ASCII)
"""A value that is no path, address or text, or the digest of one: it is written as it is."""

LONGEST_WORD = 160
PLAIN_PART = re.compile("|".join(TABLE["plain_parts"]), re.I)
"""Of a word, between its punctuation: 4096, OutOfMemoryError, H100, 80GB, tp2pp4, e4m3fn."""
PUNCTUATION = re.compile(r"[-_.:/=+*%~^#&!?…–×·°$]")

Value = TypeVar("Value", str, str | None)
"""Of a variable; None: not set."""


@cache
def software_versions() -> dict[str, str]:
    """Return package -> version of the installed packages, with Python, the kernel and this program."""
    versions = {"python": platform.python_version(), "kernel": platform.release(), "tprimat": own_version()}
    return versions | {package: version for package in TABLE["packages"] if (version := package_version(package)) is not None}


def package_version(package: str) -> str | None:
    """Return the version of an installed package, as pip names it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tuning_variables(environment: Mapping[str, Value] = os.environ) -> dict[str, Value]:
    """Return the environment variables that tune a run, such as NCCL_P2P_DISABLE=1, in alphabetical order.

    Without secrets. Of a value that may be a path, a host or a text, only a short digest is kept, which shows that two are equal.
    """
    names = [name for name in sorted(environment) if _is_of_a_library(name) and not NO_TUNING.fullmatch(name)]
    return {name: plain_or_digest(name, environment[name]) for name in names}


def masked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with a digest in place of each value that is not a library's own setting."""
    return {name: value if _is_of_a_library(name) else digest_of(name, value) for name, value in environment.items()}


def _is_of_a_library(name: str) -> bool:
    return bool(LIBRARY_VARIABLE.fullmatch(name)) and not SECRET_NAME.fullmatch(name)


def is_plain(word: str) -> bool:
    """Whether a word is one of letters, numbers and punctuation, and none that a program made up."""
    return len(word) <= LONGEST_WORD and all(PLAIN_PART.fullmatch(part) for part in PUNCTUATION.split(word) if part)


def plain_or_digest(name: str, value: Value) -> Value:
    """Return a plain value as it is, and the digest of another."""
    if value is None or (PLAIN_VALUE.fullmatch(value) and all(map(is_plain, re.split("[,; ]", value.strip("[]"))))):
        return value
    return digest_of(name, value)


def digest_of(name: str, value: str) -> str:
    """Return what stands for a value that is not written: eight digits, which show that two are equal."""
    digest = hashlib.sha256(f"{name}={value}".encode("utf8", "surrogateescape")).hexdigest()[:8]
    return value if value.startswith("[value ") else f"[value {digest}]"


def variables_of_run(added: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tune a run that starts here with some added to the environment."""
    return tuning_variables({**os.environ, **added})


def changed_variable(was: Mapping[str, str] | None, now: Mapping[str, str]) -> str | None:
    """Return a variable that differs, with both values in words; None if none does, or the former ones were not recorded."""
    if was is None:
        return None
    differing = (name for name in sorted({*was, *now}) if was.get(name) != now.get(name))
    return next((f"{name} {was.get(name, 'not set')} there, {now.get(name, 'not set')} here" for name in differing), None)


@cache
def own_version() -> str:
    """Return the release and 12 digits of the SHA-256 of this package's sources."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return f"{__version__}+source.{digest.hexdigest()[:12]}"


def node_record(machine: Machine | None, gpus: int | None) -> NodeRecord:
    """Return this machine as one of the nodes of a run; its cores are those that this process may use."""
    return NodeRecord(
        host=socket.gethostname(),
        accelerator=machine.accelerator if machine else None,
        gpus=gpus,
        memory_bytes=machine.memory_bytes if machine else None,
        driver=machine.driver if machine else None,
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def processor_name() -> str:
    """Return the processor's model as Linux names it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
