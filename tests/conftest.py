"""What holds for all tests: which ones are slow, and Ctrl-C."""

import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOW = (
    "benchmarks",
    "cli/test_console.py",
    "cli/test_micro_batch_search.py",
    "cli/test_primus_runs.py",
    "cli/test_probe.py",
    "cli/test_run_trainings.py",
    "cli/test_scaling_runs.py",
    "cli/test_suite.py",
    "cli/test_sweep_command.py",
    "launch",
    "nemo_recipes",
    "probe",
    "report/test_html.py",
    "tools",
    "train",
)
"""Files and folders whose tests start trainings, launchers or browsers. `make test-quick` leaves them out."""


def pytest_configure():
    """A shell starts its background jobs deaf to SIGINT, which tests send to programs that would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Mark the slow tests, and start them first: two workers then end at about the same time."""
    for item in items:
        if any(item.path.is_relative_to(TESTS / name) for name in SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
