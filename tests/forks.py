"""Launchers as forks of one process that has imported what they need: real processes, without their seconds of imports."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
import sys
import uuid
from unittest import mock

from tprimat.launch.process_tree import MARKER

WORD = uuid.uuid4().hex
"""In the environment of every process that a test starts (tests/conftest.py)."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch.distributed", "scipy.special", "tprimat.cli.run", "tprimat.runner.schedule"])


class Fork(CONTEXT.Process):
    """`python SCRIPT WORDS` that writes what it says to a file; the exit status is `exitcode`."""

    def __init__(self, argv, output, *, cwd, env):
        super().__init__(target=become, args=(list(map(str, argv)), str(output), str(cwd), {**env, MARKER: WORD}))
        self.output = output
        with mock.patch.dict(os.environ, {MARKER: WORD}):  # for the process that forks, when this starts it
            os.environ.pop("A_TEST_OF_LAUNCH", None)  # it outlives the test
            self.start()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def ended(self, seconds=120):
        """Its exit status and what it said."""
        self.join(seconds)
        assert self.exitcode is not None, "it did not end"
        return self.exitcode, self.output.read_text()


def stop():
    """End the process that forks, and the one that it needs, and wait for them, so that their time is counted."""
    multiprocessing.forkserver._forkserver._stop()
    multiprocessing.resource_tracker._resource_tracker._stop()


def become(argv, output, cwd, environment):
    """Run a script as the main program of this process."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(file, number)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
