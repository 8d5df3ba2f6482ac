"""The accelerator suite: run every probe in order, each in its own process, and write one page from the records."""

import sys
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tprimat.engines.base import Command
from tprimat.errors import ConfigError, RecordError
from tprimat.launch.command import python_environment, run_command
from tprimat.records.discover import PROBES_FILE
from tprimat.records.store import read_probes, write_atomically
from tprimat.report.suite import page

PROBES = ("gemm", "memory", "attention", "mlp", "transformer", "collectives", "ddp")
"""In order. The probes that other results are compared with come first, in case the time runs out."""
ON_SEVERAL_RANKS = frozenset({"collectives", "ddp"})
PAGE_NAME = "suite.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """What the suite measures, and where it writes."""

    output: Path
    skip: Set[str] = frozenset()
    """Names of probes."""
    time_budget_seconds: float | None = None
    """No probe starts after this many seconds."""
    ranks: int | None = None
    """Of collectives and ddp. None: every GPU, or two processes on a CPU."""
    size: Literal["small", "full"] | None = None
    """None: small on a CPU, full on a GPU."""


def probes_to_skip(text: str) -> frozenset[str]:
    """Read a comma-separated list of probes.

    Raises:
        ConfigError: a probe of this name does not exist.
    """
    names = frozenset(filter(None, (part.strip() for part in text.split(","))))
    for name in sorted(names):
        if name not in PROBES:
            raise ConfigError(f"There is no probe {name!r}.", where="--skip", fix=", ".join(PROBES))
    return names


def run_suite(options: SuiteOptions) -> bool:
    """Run all probes that are not skipped, as far as the time budget allows.

    Measurements that the output folder holds for this machine and software are not repeated.

    Returns:
        False if the user stopped it.
    """
    ends = None if options.time_budget_seconds is None else time.monotonic() + options.time_budget_seconds
    for probe in PROBES:
        left = None if ends is None else ends - time.monotonic()
        if probe in options.skip:
            log(f"{probe}: skipped")
        elif left is not None and left <= 0:
            log(f"{probe}: skipped, the time budget is spent")
        else:
            log(f"{probe}:")
            if not run_probe(probe, options, left):
                return False
    return True


def run_probe(probe: str, options: SuiteOptions, seconds: float | None) -> bool:
    """Run one probe in its own process, so that a crash ends no other.

    Returns:
        False if the user stopped it.
    """
    arguments = [probe, "--resume", "--json", "--output", str(options.output)]
    arguments += [f"--{options.size}"] if options.size else []
    arguments += ["--ranks", str(options.ranks)] if options.ranks and probe in ON_SEVERAL_RANKS else []
    arguments += ["--time-budget", str(seconds)] if seconds is not None else []
    command = Command(argv=(sys.executable, "-m", "tprimat", "probe", *arguments), environment=python_environment())
    ending = run_command(command, lambda line: None if line.startswith("{") else log(line))
    if ending.exit_code:
        log(f"{probe} ended with status {ending.exit_code}; its measurements so far are kept")
    return ending.stopped is None or ending.stopped.outcome != "interrupted"


def write_page(output: Path) -> Path:
    """Write the page from the records of an output folder.

    Raises:
        RecordError: there is no record.
    """
    file = output / PROBES_FILE
    probes = read_probes(file)
    if not probes:
        raise RecordError(f"{file} holds no measurement.", where=str(file), fix="run the suite without --page-only")
    target = output / PAGE_NAME
    write_atomically(target, page(probes))
    return target


def log(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)
