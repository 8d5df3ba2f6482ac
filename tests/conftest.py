"""What holds for all tests: which ones are slow, one thread for each process, bytecode, and Ctrl-C."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import forks
import pytest

from tprimat.launch.process_tree import MARKER, Reaper

TESTS = Path(__file__).parent
gc.disable()  # until all tests are imported: torch and Megatron-Core create many objects and no garbage
# Before torch is imported: threads that wait for each other on busy cores make a tiny model ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where an image forbids storing bytecode, every process of a test would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if importlib.util.find_spec("hypothesis"):  # NeMo's environment has none
    from hypothesis import settings

    settings.register_profile("busy", deadline=None)  # an example of 7 ms has taken 300 ms on a busy machine
    settings.load_profile("busy")
SLOW = (
    "train/test_layouts.py",
    "tools",
    "cli/test_run_trainings.py",
    "train/test_model_table.py",
    "cli/test_probe.py",
    "train",
    "benchmarks",
    "report/test_html.py",
    "cli/test_sweep_command.py",
    "cli/test_grid.py",
    "cli/test_console.py",
    "cli/test_help_examples.py",
    "engines/test_torchtitan.py",
    "probe",
    "launch",
    "cli/test_megatron_lm_runs.py",
    "cli/test_primus_runs.py",
    "cli/test_launchers.py",
    "cli/test_compare_all.py",
    "predict/test_accuracy.py",
    "predict/test_published_rows.py",
    "nemo_recipes",
)
"""Files and folders whose tests start trainings, launchers or browsers, or predict every record; the slowest first.
`make test-quick` leaves them out."""
PAGES = ("pages", "tools", "benchmarks")
"""Folders of tests about generated pages and pictures, and about the maintainers' scripts. Only `make test-pages` runs them."""


def pytest_configure():
    """A shell starts background jobs deaf to SIGINT, nohup to SIGHUP: programs that tests send these to would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_tests():
    """However pytest ends, by SIGKILL too: each process of a test carries a word, by which a helper finds and ends it."""
    start = subprocess.Popen.__init__
    reaper = Reaper(forks.WORD, grace_seconds=6.0)

    def marked(self, *given, env=None, **options):
        start(self, *given, env={MARKER: forks.WORD, **(os.environ if env is None else env)}, **options)

    subprocess.Popen.__init__ = marked
    yield
    subprocess.Popen.__init__ = start
    forks.stop()
    reaper.release()


def pytest_ignore_collect(collection_path, config):
    """Do not even import files that are left out: most of them import torch."""
    left_out = config.option.markexpr
    slow = "not slow" in left_out and rank_of(collection_path) < len(SLOW)
    return True if slow or ("not pages" in left_out and of_pages(collection_path)) else None


def pytest_collection_modifyitems(items):
    """Mark the slow tests, and start them first: the workers then end at about the same time."""
    for item in items:
        if rank_of(item.path) < len(SLOW):
            item.add_marker(pytest.mark.slow)
        if of_pages(item.path):
            item.add_marker(pytest.mark.pages)
    items.sort(key=lambda item: rank_of(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Collect garbage again, without ever searching what was imported."""
    gc.freeze()
    gc.enable()


@cache
def of_pages(path):
    """Whether a test is of generated pages or of the maintainers' scripts."""
    return any(path.is_relative_to(TESTS / name) for name in PAGES)


@cache
def rank_of(path):
    """The place of a test file, or of a folder of them, in SLOW."""
    return next((place for place, name in enumerate(SLOW) if path.is_relative_to(TESTS / name)), len(SLOW))
