"""Break sweeps with random faults, let them continue, and check that no run is lost, repeated or left without an end.

python benchmarks/faults.py                          200 cells, about as many faults; benchmarks/records/faults.json
python benchmarks/faults.py --cells 20 --seed 7 --output faults.json

A sweep is ./benchmark.py over five strategies, twice each, with a trainer that imitates Primus (tests/fake_primus.py). Each run
of it meets a fault at a random moment, and the next call continues with --resume. As root the results lie on a small disk
of their own, which can fill up; without root that fault is left out, and so is the clock without a C compiler.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_primus import make_machine  # noqa: E402

from tprimat.core.errors import RecordError  # noqa: E402
from tprimat.plan.schema import read_plan  # noqa: E402
from tprimat.records.discover import load_results  # noqa: E402
from tprimat.records.environment import own_version  # noqa: E402
from tprimat.records.store import RESERVE_FILE, RunDirectory, write_atomically  # noqa: E402

RECORD = ROOT / "benchmarks" / "records" / "faults.json"
STRATEGIES = ("maximum_performance", "truly_identical", "memory_optimized", "minimal_communication", "balanced")
REPEATS = 2
STEPS = 6
CELLS_OF_A_SWEEP = REPEATS * len(STRATEGIES)
LIMITS = ("startup_timeout_seconds=4", "hang_minimum_seconds=1.5", "hang_factor=5", "cooldown_seconds=0")
SMALL_DISK = "24m"
LONGEST_CALL_SECONDS = 180.0
COOKIE = "TPRIMAT_FAULTS"
CLOCK_SET_BACK = "set_clock_back"
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
static double start = -1;
static void shift(long *seconds) {
    struct timespec now;
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    real(CLOCK_MONOTONIC, &now);
    double at = now.tv_sec + now.tv_nsec * 1e-9;
    if (start < 0) start = at;
    if (at - start > 0.8) *seconds -= 86400;
}
int clock_gettime(clockid_t id, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, out);
    if (id == CLOCK_REALTIME) shift(&out->tv_sec);
    return status;
}
"""
"""Sets the clock of a process back by a day, most of a second after its start."""


@dataclass
class Sweep:
    """A folder of results, and the calls that fill it."""

    machine: dict[str, str]
    folder: Path
    cookie: str
    outputs: list[str] = field(default_factory=list)
    damaged: set[Path] = field(default_factory=set)
    """Runs of which a fault truncated a file."""
    _said: dict[int, Path] = field(default_factory=dict)
    """Pid of a call -> what it prints."""

    def start(self, act: str = "slow", **variables: str) -> subprocess.Popen[str]:
        """Start one call."""
        words = ["--model", "llama", "--parallel", ",".join(STRATEGIES), "--runs", str(REPEATS), "--steps", str(STEPS)]
        words += ["--platform", "amd", "--engine", "primus", "--resume", "--output-dir", str(self.folder)]
        settings = [word for limit in LIMITS for word in ("--set", f"benchmarking.{limit}")]
        command = [sys.executable, str(ROOT / "benchmark.py"), *words, *settings]
        environment = {**self.machine, "FAKE_PRIMUS": act, COOKIE: self.cookie, "HOME": os.environ.get("HOME", "/"), **variables}
        path = Path(self.machine["TMPDIR"], f"said-{len(self._said)}")  # no pipe: a call waits for the reader of its summary
        with path.open("w", encoding="utf8") as said:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, text=True)
        self._said[process.pid] = path
        return process

    def end(self, process: "subprocess.Popen[str]") -> int:
        """Wait for the end of a call and keep what it said. Returns its exit status."""
        status = process.wait(LONGEST_CALL_SECONDS)
        self.outputs.append(self._said.pop(process.pid).read_text(encoding="utf8"))
        return status

    def runs(self) -> list[Path]:
        """Return the folders of all runs, the newest last unless the clock was set back."""
        return sorted(self.folder.glob("runs/*"), key=lambda path: path.stat().st_ino)


Inject = Callable[[Sweep, "subprocess.Popen[str]", random.Random], set[int]]
"""Does harm to a call, and returns the exit statuses that it may end with then."""


def with_cookie(cookie: str) -> dict[int, str]:
    """Return pid -> command line of every living process of a sweep."""
    commands = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{COOKIE}={cookie}".encode() in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text(encoding="utf8").rpartition(")")[2].split()[0]
                if state not in "ZX":
                    commands[int(entry.name)] = (entry / "cmdline").read_text(encoding="utf8").replace("\0", " ")
    return commands


def victims(sweep: Sweep, word: str, seconds: float = 5.0) -> list[int]:
    """Return the processes of a sweep whose command line has a word, as soon as there is one."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        alive = [pid for pid, line in with_cookie(sweep.cookie).items() if word in line]
        if alive:
            return alive
        time.sleep(0.01)
    return []


def send(pids: list[int], number: int) -> None:
    """Signal processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def to_child(word: str, number: int, *allowed: int) -> Inject:
    """Return a signal to the processes whose command line has a word."""

    def inject(sweep: Sweep, process: "subprocess.Popen[str]", rng: random.Random) -> set[int]:
        send(victims(sweep, word), number)
        return set(allowed)

    return inject


def to_launcher(number: int, *allowed: int) -> Inject:
    """Return a signal to the launcher."""

    def inject(sweep: Sweep, process: "subprocess.Popen[str]", rng: random.Random) -> set[int]:
        process.send_signal(number)
        return set(allowed)

    return inject


def stop_launcher(sweep: Sweep, process: "subprocess.Popen[str]", rng: random.Random) -> set[int]:
    """Suspend the launcher for a while."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 6.0))
    process.send_signal(signal.SIGCONT)
    return {0}


def second_launcher(sweep: Sweep, process: "subprocess.Popen[str]", rng: random.Random) -> set[int]:
    """Start the same call once more."""
    second = sweep.end(sweep.start())
    both = process.poll() is None and second != 2
    return set() if both else {0, 2}


def fill_disk(sweep: Sweep, process: "subprocess.Popen[str]", rng: random.Random) -> set[int]:
    """Leave no room on the disk of the results for a while."""
    filler = sweep.folder.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    time.sleep(rng.uniform(0.2, 2.0))
    filler.unlink()
    return {0, 1, 2}


def truncate(sweep: Sweep, process: "subprocess.Popen[str]", rng: random.Random) -> set[int]:
    """Cut a file of an earlier run."""
    earlier = [path for path in sweep.runs()[:-1] if path not in sweep.damaged]
    files = [file for path in earlier for name in ("run.json", "steps.jsonl", "plan.json") if (file := path / name).is_file()]
    if files and (size := (file := rng.choice(files)).stat().st_size) > 2:
        os.truncate(file, rng.randrange(size - 1))
        sweep.damaged.add(file.parent)
    return {0}


FAULTS: dict[str, tuple[str, Inject]] = {
    "kill_rank": ("`kill -9` of the trainer", to_child("primus-cli", signal.SIGKILL, 0, 1)),
    "stop_rank": ("SIGSTOP of the trainer", to_child("primus-cli", signal.SIGSTOP, 0, 1)),
    "kill_sampler": ("`kill -9` of the program that reads power and clocks", to_child("rocm-smi", signal.SIGKILL, 0)),
    "kill_launcher": ("`kill -9` of the launcher", to_launcher(signal.SIGKILL, -signal.SIGKILL)),
    "stop_launcher": ("SIGSTOP of the launcher, and SIGCONT up to 6 s later", stop_launcher),
    "interrupt": ("Ctrl-C", to_launcher(signal.SIGINT, 0, 130)),
    "terminate": ("SIGTERM", to_launcher(signal.SIGTERM, 0, 143, -signal.SIGTERM)),
    "second_launcher": ("a second launcher in the same folder", second_launcher),
    "fill_disk": ("a full disk", fill_disk),
    "truncate": ("a truncated run.json, steps.jsonl or plan.json", truncate),
    CLOCK_SET_BACK: ("the clock set back by a day in the middle of a call", lambda *_: {0}),
}


def break_calls(sweep: Sweep, faults: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Make calls, of which each new run meets the next fault. Returns: the faults, fewer if all runs end first; what is wrong."""
    every: list[str] = []
    wrong: list[str] = []
    left = list(faults)
    while left:
        variables, met, allowed = {}, [], {0}
        if CLOCK_SET_BACK in left and rng.random() < 0.5:
            left.remove(CLOCK_SET_BACK)
            variables["LD_PRELOAD"] = sweep.machine["CLOCK"]
            met.append(CLOCK_SET_BACK)
        process = sweep.start(**variables)
        known = len(sweep.runs())
        others = [name for name in left if name != CLOCK_SET_BACK]
        while others and process.poll() is None:
            if len(sweep.runs()) == known:
                time.sleep(0.02)
                continue
            known = len(sweep.runs())
            time.sleep(rng.uniform(0.0, 0.9))
            if process.poll() is None:
                met.append(others.pop(0))
                left.remove(met[-1])
                allowed |= FAULTS[met[-1]][1](sweep, process, rng) or {99}
        every += met
        status = sweep.end(process)
        if status not in allowed or 99 in allowed:
            wrong.append(f"{met}: exit status {status}, expected one of {sorted(allowed)}: {sweep.outputs[-1][-500:]}")
        ends = time.monotonic() + 20
        while remaining := with_cookie(sweep.cookie):  # the helper that ends the ranks of a killed launcher needs its grace
            if time.monotonic() > ends:
                wrong.append(f"{met}: processes are left: {remaining}")
                break
            time.sleep(0.05)
        if not met and status == 0:  # everything is complete: the rest has nothing to break
            break
    return every, wrong


def check(sweep: Sweep) -> tuple[list[str], Counter[str]]:
    """Return what is wrong with the results of a sweep whose last call ended well, and its outcomes."""
    wrong: list[str] = []
    damage: list[str] = []
    outcomes: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for path in sorted(sweep.folder.glob("runs/*")):
        directory = RunDirectory(path)
        try:
            plan, (run, steps) = read_plan(directory.plan_file), directory.read_whole()
        except RecordError as error:
            outcomes["damaged" if directory.run_file.exists() else "not begun"] += 1
            damage.append(error.what)
            continue
        outcomes[run.outcome] += 1
        if run.counts:
            counted[plan.strategy] += 1
            if [step.step for step in steps] != list(range(1, STEPS + 1)):
                wrong.append(f"{run.run_id} counts with steps {[step.step for step in steps]}")
        elif run.outcome == "running" or not run.cause:
            wrong.append(f"{run.run_id} has no end or no cause: {run.outcome}")
    wrong += [f"{name}: {counted[name]} runs count, not {REPEATS}" for name in STRATEGIES if counted[name] != REPEATS]
    if outcomes["damaged"] > len(sweep.damaged):
        wrong.append(f"{outcomes['damaged']} records are damaged, {len(sweep.damaged)} of them by a fault: {damage}")
    results, problems = load_results([sweep.folder])
    if len(problems) > 2 * len(sweep.damaged):
        wrong.append(f"reading names {len(problems)} problems: {problems[0]}")
    if len({result.run.run_id for result in results}) != len(results):
        wrong.append("a run is read twice")
    wrong += [f"left behind: {path}" for path in sweep.folder.rglob(RESERVE_FILE)]
    wrong += [f"a traceback: {said[-800:]}" for said in sweep.outputs if "Traceback" in said]
    return wrong, outcomes


def make_sweep(place: Path, number: int, machine: dict[str, str], faults: list[str], rng: random.Random) -> dict[str, Any]:
    """Fill one folder in spite of its faults. Returns: what the record says of it."""
    folder = place / f"sweep-{number}" / "out"
    sweep = Sweep(machine, folder, f"{os.getpid()}-{number}")
    met, wrong = break_calls(sweep, faults, rng)
    if (status := sweep.end(sweep.start(act="once"))) != 0:
        wrong.append(f"the last call, which nothing disturbed, ended with status {status}: {sweep.outputs[-1][-500:]}")
    mistakes, outcomes = check(sweep)
    shutil.rmtree(folder.parent)
    return {"faults": met, "outcomes": dict(sorted(outcomes.items())), "wrong": [*wrong, *mistakes]}


def small_disk(place: Path) -> bool:
    """Mount a disk that can fill up. Returns False where this user may not."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "none", str(place)]
    return os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0


def clock_library(place: Path) -> Path | None:
    """Compile the library that sets a process's clock back. None where there is no compiler."""
    if (compiler := shutil.which("cc")) is None:
        return None
    (place / "clock.c").write_text(CLOCK, encoding="utf8")
    command = [compiler, "-shared", "-fPIC", "-o", str(place / "clock.so"), str(place / "clock.c"), "-ldl"]
    return place / "clock.so" if subprocess.run(command, check=False).returncode == 0 else None


def main() -> int:
    """Exit status: 0, 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200, help=f"rounded up to sweeps of {CELLS_OF_A_SWEEP} (200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", default=",".join(FAULTS), metavar="A,B", help="of " + ", ".join(FAULTS))
    parser.add_argument("--output", type=Path, default=RECORD, metavar="FILE")
    options = parser.parse_args()
    if os.geteuid() == 0 and COOKIE not in os.environ and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0:
        os.execvpe("unshare", ["unshare", "-m", sys.executable, *sys.argv], {**os.environ, COOKIE: "root"})
    names = options.faults.split(",")
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="tprimat-faults-", ignore_cleanup_errors=True) as folder:
        place, disk = Path(folder, "machine"), Path(folder, "disk")
        place.mkdir()
        disk.mkdir()
        machine = {**make_machine(place), "TMPDIR": str(place)}
        left_out = {}
        if not small_disk(disk):
            left_out["fill_disk"] = "needs root"
        if (clock := clock_library(place)) is not None:
            machine["CLOCK"] = str(clock)
        else:
            left_out[CLOCK_SET_BACK] = "needs a C compiler"
        names = [name for name in names if name not in left_out]
        sweeps = -(-options.cells // CELLS_OF_A_SWEEP)
        order = [name for _ in range(-(-sweeps * CELLS_OF_A_SWEEP // len(names))) for name in names][: sweeps * CELLS_OF_A_SWEEP]
        rng.shuffle(order)
        results = []
        for number in range(sweeps):
            began = time.monotonic()
            faults = order[number * CELLS_OF_A_SWEEP : (number + 1) * CELLS_OF_A_SWEEP]
            results.append(make_sweep(disk, number, machine, faults, rng))
            print(f"sweep {number + 1} of {sweeps}: {results[-1]['outcomes']}, {time.monotonic() - began:.0f} s", file=sys.stderr)
            for text in results[-1]["wrong"]:
                print(f"  WRONG {text}", file=sys.stderr)
        subprocess.run(["umount", str(disk)], check=False, capture_output=True)
        leftovers = sorted(
            path.name for path in place.iterdir() if path.name not in {"bin", "Primus", "clock.c", "clock.so", "said-0", "said-1"}
        )
    record = {
        "cells": sweeps * CELLS_OF_A_SWEEP,
        "seed": options.seed,
        "version": own_version(),
        "left_out": left_out,
        "left_in_the_temporary_folder": leftovers,
        "sweeps": results,
    }
    write_atomically(options.output, json.dumps(record, indent=1) + "\n")
    bad = sum(bool(sweep["wrong"]) for sweep in results) + bool(leftovers)
    met = sum(len(sweep["faults"]) for sweep in results)
    print(f"{record['cells']} cells, {met} faults: {bad or 'nothing'} wrong; {options.output}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
