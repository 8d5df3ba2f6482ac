#!/usr/bin/env python3
"""Measure short runs of which one part is made worse on purpose, each with a trace, for benchmarks/results/explain.md.

python3 benchmarks/explain_cases.py --output explain-cases                 what 1 and 2 GPUs can run; again: only what is missing
python3 benchmarks/explain_cases.py --output explain-cases --gpus 1        without those of 2 GPUs
python3 benchmarks/explain_cases.py --output explain-cases --only late_host,uneven_ranks --rounds 2
python3 benchmarks/explain_cases.py --output /tmp/cases --platform cpu     only check that it works

First probes of this machine (three minutes; --no-probes leaves them out), then a run of each case, which trains six layers for
seconds. From the third step on, the ranks of late_host share one core with a busy loop, and another process multiplies on the
second GPU of uneven_ranks; on a CPU it takes the core of the second rank. OUTPUT/CASE/ROUND has the record of each run, with
trace.json, the summary of its trace.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shallow import write_shallow_config  # noqa: E402

from tprimat.core.errors import MetricError  # noqa: E402
from tprimat.records.discover import read_result  # noqa: E402
from tprimat.records.schema import StepRecord  # noqa: E402
from tprimat.records.store import read_lines  # noqa: E402
from tprimat.runner.explain import trace_of_run, traces_of  # noqa: E402

STEPS, WARMUP, PROFILED = 16, 5, 12
UNDISTURBED = 2
"""Steps that have ended when a case is made worse, so that neither start nor compilation is."""
PROBES = "pieces,memory,collectives"
PROFILER = {
    "enabled": "true",
    "record_shapes": "false",
    "profile_memory": "false",
    "schedule.wait": str(PROFILED - 2),
    "schedule.warmup": "1",
    "schedule.active": "1",
}
BUSY = """
import sys
sys.stdin.readline()
sys.stdin.readline()
while True:
    pass
"""
MULTIPLY = """
import sys, time, torch
sys.stdin.readline()
matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda:1")
matrix @ matrix
torch.cuda.synchronize()
sys.stdin.readline()
while True:
    for _ in range(20):
        matrix @ matrix
    torch.cuda.synchronize()
    time.sleep(0.06)
"""
"""Programs that disturb a run: the first line says that it has started, before which its GPUs must be free, the second that steps
have ended. Imports and a first product take longer than steps do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration."""

    name: str
    gpus: int
    flags: tuple[str, ...] = ()
    model: str = "llama"
    layers: int = 6
    batch: int = 32
    micro_batch: int = 4
    worse: str = ""
    """What is made worse while it runs."""


CASES = (
    Case(name="one_gpu", gpus=1, batch=16),
    Case(name="one_gpu_fp8", gpus=1, batch=16, flags=("--precision", "fp8")),
    Case(name="dp2", gpus=2),
    Case(name="smaller_micro_batch", gpus=2, micro_batch=1),
    Case(name="late_host", gpus=2, worse="host"),
    Case(name="uneven_ranks", gpus=2, worse="rank"),
    Case(name="recompute", gpus=2, flags=("--set", "platform_optimizations.{platform}.recompute=full")),
    Case(name="tp2", gpus=2, flags=("--tp", "2")),
    Case(name="pp2", gpus=2, flags=("--pp", "2")),
    Case(name="ep2", gpus=2, flags=("--set", "ep=2"), model="qwen3_moe", layers=4),
)


def descendants(root: int) -> list[int]:
    """Return the processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            children.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(int(entry.name))
    descending, left = [], [root]
    while left:
        left += (below := children.get(left.pop(), []))
        descending += below
    return descending


def rank_processes(root: int) -> dict[int, bytes]:
    """Return the processes that train, each with its rank: those below one that have one."""
    ranks = {}
    for process in descendants(root):
        with contextlib.suppress(OSError, StopIteration):
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            ranks[process] = next(word for word in words if word.startswith(b"LOCAL_RANK="))
    return ranks


def pin(process: int, core: int) -> None:
    """Let all threads of a process run on one core."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), {core})


@contextlib.contextmanager
def disturbed(case: Case, root: int, folder: Path, platform: str) -> Iterator[None]:
    """Make a running case worse once its first steps have ended, until it ends."""
    if not case.worse:
        yield
        return
    multiplies = case.worse == "rank" and platform != "cpu"
    helper = subprocess.Popen([sys.executable, "-c", MULTIPLY if multiplies else BUSY], stdin=subprocess.PIPE, bufsize=0)
    assert helper.stdin is not None
    try:
        wait_for(lambda: any(folder.glob("runs/*/run.json")), root)
        helper.stdin.write(b"\n")
        wait_for(lambda: ended_steps(folder) >= UNDISTURBED, root)
        ranks = {} if multiplies else rank_processes(root)
        slowed = [process for process, rank in ranks.items() if case.worse == "host" or rank == b"LOCAL_RANK=1"]
        for process in (helper.pid, *slowed) if slowed else ():
            pin(process, min(os.sched_getaffinity(0)))
        helper.stdin.write(b"\n")
        yield
    finally:
        helper.kill()
        helper.wait()


def ended_steps(folder: Path) -> int:
    """Return the steps of the run in a folder that have ended."""
    return sum(len(read_lines(StepRecord, file)) for file in folder.glob("runs/*/steps.jsonl"))


def wait_for(happened: Callable[[], bool], root: int) -> None:
    """Wait until something happens, but not longer than a process lives, nor five minutes."""
    ended = time.monotonic() + 300
    while time.monotonic() < ended and Path(f"/proc/{root}").exists() and not happened():
        time.sleep(0.05)


def make(case: Case, folder: Path, platform: str) -> bool:
    """Run a case into a folder, and leave the summary of its trace beside the record; return whether it completed."""
    shutil.rmtree(folder, ignore_errors=True)
    write_shallow_config(folder / "config.yaml", case.layers, model=case.model)
    small = platform == "cpu"
    words = ["--config", str(folder / "config.yaml"), "--output-dir", str(folder), "--model", case.model, "--engine", "megatron"]
    words += ["--platform", platform, "--gpus", str(case.gpus), "--steps", str(STEPS), "--set", f"warmup={WARMUP}"]
    words += ["--global-batch-size", str(8 if small else case.batch), "--micro-batch-size", str(1 if small else case.micro_batch)]
    words += [] if {"--tp", "--pp", "ep=2"} & set(case.flags) else ["--tp", "1"]
    words += [word.format(platform=platform) for word in case.flags if not (small and word in {"--precision", "fp8"})]
    for name, value in PROFILER.items():
        words += ["--set", f"profiling.{name}={value}"]
    with (folder / "console.txt").open("wb") as console:
        started = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmark.py"), *words], stdout=console, stderr=subprocess.STDOUT, cwd=ROOT
        )
        with disturbed(case, started.pid, folder, platform):
            started.wait()
    records = sorted(folder.glob("runs/*/run.json"))
    if started.returncode or not records:
        return False
    with contextlib.suppress(MetricError):
        trace_of_run(read_result(records[-1].parent).run, records[-1].parent)
    for file in traces_of(folder, records[-1].parent.name):
        file.unlink()
    shutil.rmtree(folder / "profiler", ignore_errors=True)
    return True


def is_made(folder: Path) -> bool:
    """Return whether an earlier call has completed a run here."""
    return any(json.loads(file.read_text())["outcome"] == "completed" for file in folder.glob("runs/*/run.json"))


def measure_probes(output: Path, gpus: int) -> None:
    """Measure what predictions need, once."""
    if not (output / "probes.jsonl").exists():
        words = ["probe", PROBES, "--output", str(output / "probes.jsonl"), "--ranks", str(gpus)]
        subprocess.run([sys.executable, "-m", "tprimat", *words], cwd=ROOT, check=False)


def main() -> int:
    """Exit status: 0, or 1 where a case did not complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the records go")
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="1 or 2 (2)")
    parser.add_argument("--platform", default="nvidia", choices=("nvidia", "amd", "cpu"), help="default: nvidia")
    parser.add_argument("--only", metavar="A,B", help=f"some of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each case, in turn (1)")
    parser.add_argument("--no-probes", action="store_true", help="predict by published rates")
    options = parser.parse_args()
    output = options.output.resolve()
    wanted = options.only.split(",") if options.only else [case.name for case in CASES]
    cases = [case for case in CASES if case.name in wanted and case.gpus <= options.gpus]
    output.mkdir(parents=True, exist_ok=True)
    if not options.no_probes and options.platform != "cpu":
        measure_probes(output, options.gpus)
    failed = []
    for number in range(1, options.rounds + 1):
        for case in cases:
            folder, began = output / case.name / str(number), time.monotonic()
            if is_made(folder):
                continue
            completed = make(case, folder, options.platform)
            failed += [] if completed else [folder]
            print(
                f"{case.name} {number}: {'completed' if completed else 'failed'} in {time.monotonic() - began:.0f} s", flush=True
            )
    for folder in failed:
        print(f"see {folder / 'console.txt'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
