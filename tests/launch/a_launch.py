"""Starts a command through the real launcher, in this process or, as a script, in one that can be killed.

python tests/launch/a_launch.py FOLDER GRACE_SECONDS COMMAND... prints outcome, cause, exit status and number of steps as JSON.
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from changes import record as record_of  # noqa: E402

from tprimat.engines.base import Command  # noqa: E402
from tprimat.launch.process_tree import read_proc, stat_of  # noqa: E402
from tprimat.launch.run import Launch, run  # noqa: E402
from tprimat.plan.schema import BenchmarkingConfig  # noqa: E402
from tprimat.records.schema import Machine  # noqa: E402
from tprimat.records.store import RunDirectory  # noqa: E402

TRAINER = (sys.executable, "-S", str(ROOT / "tests" / "fake_trainer.py"))


class Notes:
    """A watcher that records what it receives."""

    def __init__(self):
        self.lines, self.waits, self.steps, self.notices = [], [], [], []
        self.on_line, self.on_wait = self.lines.append, self.waits.append
        self.on_step, self.on_notice = self.steps.append, self.notices.append


def first_record(**fields):
    absent = {f"{kind}_parallel": None for kind in ("tensor", "pipeline", "data")}
    absent |= dict.fromkeys(("micro_batch_sequences", "global_batch_sequences", "sequence_tokens"))
    given = {
        "run_id": "r1",
        "model": "llama",
        "strategy": "minimal",
        "engine": "megatron",
        "matmul_dtype": None,
        "machine": Machine(platform="cpu", accelerator="a processor", gpus_per_node=1, nodes=1),
        "started_at": "2026-01-01T00:00:00.000+00:00",
        "clock": "step_end",
        "outcome": "running",
    }
    return record_of(**{**absent, **given, **fields})


def a_launch(folder, *words, limits=None, **fields):
    """A launch of the fake trainer; limits are far away unless given."""
    directory = RunDirectory(Path(folder))
    directory.path.mkdir(parents=True, exist_ok=True)
    environment = {"FAKE_STEPS": str(directory.steps_file), "FAKE_RUN": str(directory.run_file)}
    far = {"startup_timeout_seconds": 60.0, "hang_factor": 10.0, "hang_minimum_seconds": 60.0}
    given = {
        "command": Command(argv=(*TRAINER, *map(str, words)), environment=environment),
        "directory": directory,
        "record": first_record(),
        "limits": BenchmarkingConfig(**{**far, **(limits or {})}),
        "grace_seconds": 2.0,
    }
    return Launch(**{**given, **fields})


def processes_with(word):
    """The pids of all living processes that carry the word in their environment, zombies left out."""
    pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {pid for pid in pids if word.encode() in read_proc(pid, "environ") and stat_of(pid)[0] not in "ZX"}


def leftovers():
    """Folders of torchrun in the temporary folder whose pid has ended, which tests of this process's children left."""
    pids = [path.name.split("-")[2] for path in Path(tempfile.gettempdir()).glob("tprimat-torchrun-*")]
    return [pid for pid in pids if pid.isdigit() and not Path("/proc", pid).exists()]


def wait_for(condition, seconds=120.0, pause=0.02, explain=lambda: "it did not happen in time"):
    """Wait until the condition holds; the limit only ends a test that would wait forever. What costs much is asked rarely."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(pause)


def main():
    plain = a_launch(sys.argv[1], grace_seconds=float(sys.argv[2]))
    command = dataclasses.replace(plain.command, argv=tuple(sys.argv[3:]))
    record, steps = run(dataclasses.replace(plain, command=command), Notes())
    print(json.dumps([record.outcome, record.cause, record.exit_code, len(steps)]), flush=True)


if __name__ == "__main__":
    main()
