"""What holds for all tests: which ones are slow, one thread for each process, and Ctrl-C."""

import os
import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported: threads that wait for each other on busy cores make a tiny model ten times slower."""
SLOW = (
    "train/test_layouts.py",
    "cli/test_probe.py",
    "cli/test_run_trainings.py",
    "tools",
    "cli/test_micro_batch_search.py",
    "train",
    "report/test_html.py",
    "benchmarks",
    "probe",
    "cli/test_suite.py",
    "cli/test_sweep_command.py",
    "cli/test_console.py",
    "cli/test_primus_runs.py",
    "cli/test_scaling_runs.py",
    "engines/test_torchtitan.py",
    "launch",
    "nemo_recipes",
)
"""Files and folders whose tests start trainings, launchers or browsers, the slowest first. `make test-quick` leaves them out."""


def pytest_configure():
    """A shell starts its background jobs deaf to SIGINT, which tests send to programs that would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Mark the slow tests, and start them first: two workers then end at about the same time."""
    for item in items:
        if rank_of(item) < len(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=rank_of)


def rank_of(item):
    """The place of a test's file in SLOW."""
    return next((place for place, name in enumerate(SLOW) if item.path.is_relative_to(TESTS / name)), len(SLOW))
