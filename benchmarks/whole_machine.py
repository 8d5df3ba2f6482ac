#!/usr/bin/env python3
"""Measure a machine of several GPUs: probes, each layout in turn with its peers, the five strategies, and scaling.

python3 benchmarks/whole_machine.py --output output/whole-machine
python3 benchmarks/whole_machine.py --time-limit 580    where a command may take ten minutes: repeat it until nothing is left
python3 benchmarks/whole_machine.py --list              the commands, in order; starts nothing

Each step is a separate command that continues where it stopped. A step that fails is not repeated, and the next one starts:
`--retry NAME` makes it again. Steps that need more GPUs than are here are left out, and so is NeMo where it is not installed.
Each number of GPUs has its own folder below --output.
Each run predicts its time and memory before it starts, from the probes, which come first.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from engine_speed import AGAIN  # noqa: E402
from speed_layouts import MEANT_FOR  # noqa: E402
from speed_programs import FINDERS, GRAPHS, Program, program_named  # noqa: E402

from tprimat.core.accelerators import PLATFORM_OF  # noqa: E402
from tprimat.core.errors import RecordError, UserError  # noqa: E402
from tprimat.engines import megatron, nemo  # noqa: E402
from tprimat.hardware.nodes import this_machine  # noqa: E402
from tprimat.records.store import json_document, write_atomically  # noqa: E402

ROWS = (
    "dp_mbs4",
    "dp_mbs1",
    "tp2_mbs4",
    "tp4_mbs4",
    "tp2_pp2_mbs4",
    "tp2_pp2_vpp2_mbs4",
    "dp_mbs4_fp8",
    "dp_s8192_mbs1",
    "dp_s8192_mbs1_fp8",
    "qwen_dp_mbs4",
    "tp2_mbs4_fp8",
    "tp4_mbs4_fp8",
    "tp4_s8192_mbs1",
    "dp_mbs2_sharded",
    "dp_mbs4_full",
    "qwen_tp2_mbs4",
    "qwen_dp_mbs2_sharded",
    "qwen_tp2_pp2_mbs4",
    "moe_ep4",
    "moe_ep4_balanced",
)
"""What does not fit the GPUs here is left out."""
AS_GRAPHS = ("tp4_mbs4", "tp4_mbs4_fp8", "tp2_mbs4", "dp_mbs1")
"""Where a micro-batch's kernels are short, and the GPU may wait for the host."""
STRATEGIES_NEED = 8
"""GPUs: Qwen's TP4 PP2."""
SCALED, SCALED_MICRO_BATCH, SCALED_SEQUENCES = "llama-3.2-3b", 2, 16
"""A model that one GPU of 80 GB holds, too, and the sequences of each GPU in a micro-batch and a step."""
TO_STOP_SECONDS = 25.0
"""After Ctrl-C a run has 10 s to stop its ranks; then its command writes what is there."""
TO_KILL_SECONDS = 20.0
"""After Ctrl-C a step that still runs hangs."""
TO_SHOW_SECONDS = 5.0
"""After a step has ended, for the last lines that it printed; a process that outlives it may hold its output open."""
NOTES = "done.json"
"""Name of each step that was made -> its exit status."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command."""

    name: str
    words: tuple[str, ...]
    folder: Path
    """Where it runs."""
    knows_limit: bool = False
    """It takes --time-limit, and says whether it is done."""


def steps(gpus: int, output: Path, programs: Sequence[Program]) -> list[Step]:
    """Return what is measured on so many GPUs, in order.

    Args:
        gpus: of this machine.
        output: absolute; each step has a folder in it.
        programs: the embedded engine, then the others that are installed here.
    """
    probes = output / f"probes-{gpus}"
    fewer = [2**power for power in range(gpus.bit_length()) if 2**power < gpus]
    command = (sys.executable, "-m", "tprimat")

    def probe(name: str, kinds: str, folder: Path, ranks: int) -> Step:
        words = (*command, "probe", kinds, "--output", str(folder), "--ranks", str(ranks), "--resume")
        return Step(name=name, words=words, folder=output)

    steps = [probe("probes", "all", probes, gpus), probe("pieces", "pieces,overlap", probes, gpus)]
    for ranks in fewer:
        kinds = "ddp" if ranks == 1 else "collectives,ddp"
        steps.append(probe(f"probes-{ranks}", kinds, output / f"probes-{ranks}", ranks))
    # NeMo with a Python of its own trains the strategies alone.
    against = ",".join(program.name for program in programs[1:] if program.python == sys.executable) or "none"
    speed = (sys.executable, str(ROOT / "benchmarks" / "engine_speed.py"), "--resume", "--gpus", str(gpus), "--rounds", "3")
    speed += ("--steps", "10", "--probes", str(probes), *(("--equal-work",) if gpus != MEANT_FOR else ()))
    words = (*speed, "--output", str(output / "in-turn"), "--against", against, "--only", ",".join(ROWS))
    steps.append(Step(name="in-turn", words=words, folder=output, knows_limit=True))
    layers = "transformer_engine" if "transformer_engine" in against.split(",") else "none"
    words = (*speed, "--output", str(output / "in-turn-graphs"), "--against", layers, "--only", ",".join(AS_GRAPHS))
    words += ("--set", "platform_optimizations.nvidia.engine_options.cuda_graphs=true")
    steps.append(Step(name="in-turn-graphs", words=words, folder=output, knows_limit=True))
    common = ("--steps", "10", "--gpus", str(gpus), "--set", f"probes={probes}")
    for program in programs if gpus >= STRATEGIES_NEED else ():
        if program.name in (megatron.ENGINE.name, nemo.ENGINE.name):
            settings = [word for setting in program.settings for word in ("--set", f"platform_optimizations.nvidia.{setting}")]
            words = (program.python, "-m", "tprimat", "sweep", "both", "--engine", program.engine, *common, *settings)
            steps.append(Step(name=f"strategies-{program.name}", words=words, folder=output / f"strategies-{program.name}"))
    scaled = [("weak", count) for count in (*fewer, gpus)] + [("strong", count) for count in fewer]  # both end in the same run
    for mode, count in scaled:
        batch = SCALED_SEQUENCES * gpus if mode == "strong" else SCALED_SEQUENCES * count
        words = (*command, "run", "--engine", programs[0].engine, "--model", "llama", "--steps", "10", "--gpus", str(count))
        words += ("--micro-batch-size", str(SCALED_MICRO_BATCH), "--set", f"models.llama.architecture={SCALED}")
        words += ("--set", f"probes={probes}")
        words += (
            "--global-batch-size",
            str(batch),
            "--resume",
            "--output-dir",
            str(output / f"scaling-{mode}" / f"gpus-{count}"),
        )
        steps.append(Step(name=f"scaling-{mode}-{count}", words=words, folder=output))
    return steps


def programs_here(options: argparse.Namespace) -> list[Program]:
    """Return the embedded engine and the others that are installed; say which are not."""
    programs = [program_named(megatron.ENGINE.name, options)]
    for name in (name for name in FINDERS if not name.endswith(GRAPHS)):
        try:
            programs.append(program_named(name, options))
        except UserError as error:
            print(f"without {name}: {error.what}", file=sys.stderr)
    return programs


def make(step: Step, left: float | None) -> tuple[int | None, float]:
    """Run a step for at most so many seconds. Return its exit status, None if its time was too short, and how long it took."""
    step.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    limit = ("--time-limit", str(max(1, round(left)))) if step.knows_limit and left is not None else ()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    environment["PYTHONUNBUFFERED"] = "1"  # or Python would keep what it prints to a pipe until its buffer is full
    running = subprocess.Popen(
        [*_with_probes_that_exist(step.words), *limit],
        cwd=step.folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    printed: list[str] = []
    shown = threading.Thread(target=_show, args=(running, printed), daemon=True)
    shown.start()
    in_time = True
    try:
        running.wait(None if left is None or limit else left)
    except subprocess.TimeoutExpired:
        in_time = False
        _stop(running)
    except KeyboardInterrupt:
        _stop(running)
        raise
    finally:
        shown.join(TO_SHOW_SECONDS)
    done = (in_time or running.returncode == 0) and not (step.knows_limit and AGAIN in "".join(printed))
    return (running.returncode if done else None), time.monotonic() - began


def _show(running: subprocess.Popen[str], printed: list[str]) -> None:
    """Print what a step prints as it comes, and keep it."""
    assert running.stdout is not None
    for line in running.stdout:
        printed.append(line)
        print(line, end="", flush=True)


def _stop(running: subprocess.Popen[str]) -> None:
    """End a step as Ctrl-C does, and kill it where it does not end or Ctrl-C comes again."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(TO_KILL_SECONDS)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def made(output: Path) -> dict[str, int]:
    """Return the exit status of each step that was made.

    Raises:
        RecordError: the notes are damaged.
    """
    notes = output / NOTES
    document = json_document(notes.read_bytes(), notes) if notes.exists() else {}
    if not isinstance(document, dict) or not all(type(status) is int for status in document.values()):
        what, fix = f"{notes} does not hold the exit status of each step.", "delete it: every step then goes on from its records"
        raise RecordError(what, where=str(notes), fix=fix)
    return document


def _with_probes_that_exist(words: Sequence[str]) -> list[str]:
    """Leave `--probes` and `--set probes=` out where probing has failed: published figures then have to do."""
    place = next((at for at, word in enumerate(words) if word == "--probes" or word.startswith("probes=")), len(words))
    at = place if place < len(words) and words[place] == "--probes" else place - 1
    folder = "" if place == len(words) else words[at + 1].removeprefix("probes=")
    exists = folder and (Path(folder) / "probes.jsonl").exists()
    return list(words) if exists or not folder else [*words[:at], *words[at + 2 :]]


def series(chosen: Sequence[Step], output: Path, time_limit: float | None) -> int:
    """Run the steps that are not done. Exit status: 0, or 1 where one failed, in this call or an earlier one."""
    ends = None if time_limit is None else time.monotonic() + time_limit - TO_STOP_SECONDS
    output.mkdir(parents=True, exist_ok=True)
    done = made(output)
    for step in (step for step in chosen if step.name not in done):
        left = None if ends is None else ends - time.monotonic()
        if left is not None and left <= 0:
            break
        print(f"\n{step.name}: {shlex.join(step.words)}", flush=True)
        status, seconds = make(step, left)
        if status is None:
            break
        done[step.name] = status
        write_atomically(output / NOTES, json.dumps(done, indent=2) + "\n")
        print(f"{step.name}: {'done' if status == 0 else f'failed with status {status}'} in {seconds:.0f} s", flush=True)
    failed = [step.name for step in chosen if done.get(step.name)]
    missing = [step.name for step in chosen if step.name not in done]
    print(
        f"\n{len(chosen) - len(missing)} of {len(chosen)} steps are done; "
        + (f"call again for {', '.join(missing)}" if missing else "nothing is left")
    )
    if failed:
        print(f"failed: {', '.join(failed)}; --retry NAME makes one again")
    return 1 if failed else 0


def main() -> int:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FOLDER", default=Path("output/whole-machine"))
    parser.add_argument("--gpus", type=int, metavar="N", help="use fewer than there are")
    parser.add_argument("--nemo-python", type=Path, metavar="PATH", help="the Python with NeMo (.venv-nemo/bin/python)")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop after so long; the next call goes on")
    parser.add_argument("--retry", metavar="NAME", help="a step that failed")
    parser.add_argument("--list", action="store_true", help="print the commands")
    options = parser.parse_args()
    machine = this_machine()
    here = machine.gpus_per_node if machine and machine.platform != "cpu" else None
    gpus = here if options.gpus is None else options.gpus
    if gpus is None:
        parser.error("there is no GPU here")
    if gpus < 1 or (here is not None and gpus > here and not options.list):
        parser.error(f"--gpus {gpus}: there are {here or 'none'} here")
    if options.time_limit is not None and not TO_STOP_SECONDS < options.time_limit < math.inf:
        parser.error(f"--time-limit {options.time_limit:g}: a step takes up to {TO_STOP_SECONDS:.0f} s to stop")
    output = options.output.resolve() / f"{gpus}-gpus"
    platform = PLATFORM_OF[machine.platform] if machine and machine.platform != "cpu" else "nvidia"
    asked = argparse.Namespace(platform=platform, nemo_python=options.nemo_python, peer_steps=0)
    chosen = steps(gpus, output, programs_here(asked))
    if options.list:
        print("\n".join(f"{step.name}: {shlex.join(step.words)}" for step in chosen))
        return 0
    if options.retry:
        done = made(output)
        if options.retry not in done:
            parser.error(f"there is no step {options.retry!r} that was made: {', '.join(done) or 'none was'}")
        del done[options.retry]
        write_atomically(output / NOTES, json.dumps(done, indent=2) + "\n")
    return series(chosen, output, options.time_limit)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # a step has a session of its own: nobody else would stop it
    try:
        sys.exit(main())
    except KeyboardInterrupt as stop:
        print("stopped; the same call continues from here", file=sys.stderr)
        sys.exit(128 + (stop.args[0] if stop.args else signal.SIGINT))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
