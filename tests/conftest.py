"""What holds for all tests: the order of the files, and Ctrl-C."""

import signal
from pathlib import Path

TESTS = Path(__file__).parent
TIMED = (
    "cli/test_extract.py",
    "launch",
    "tools/test_engine_speed.py",
    "train/test_profiler.py",
    "train/test_step_clock.py",
)
"""Files and folders whose tests look at a clock: they come last, when what .ci/run does beside the tests is over."""


def pytest_configure():
    """A shell starts its background jobs deaf to SIGINT, which tests send to programs that would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: any(item.path.is_relative_to(TESTS / name) for name in TIMED))
