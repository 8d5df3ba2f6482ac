"""Measure what a long run costs: seconds, and peak memory of the processes that write and read it.

python benchmarks/large_records.py                               benchmarks/records/large.json
python benchmarks/large_records.py --steps 10000 --output large.json

A trainer that only writes steps (tests/fake_trainer.py) makes a run of a million steps under the real launcher;
compare.py reads it.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tprimat.records.environment import own_version, processor_name  # noqa: E402
from tprimat.records.store import write_atomically  # noqa: E402

RECORD = ROOT / "benchmarks" / "records" / "large.json"
LAUNCHER = ROOT / "tests" / "launch" / "a_node.py"
LAUNCHER_BYTES, COMPARE_SECONDS = 200e6, 10.0
"""Targets."""
POLL_SECONDS = 0.02


def measured(command: Sequence[str], **environment: str) -> dict[str, float]:
    """Run a command to its end; return its seconds, those of the processor, and the peak memory of its first process in bytes.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryFile("w+") as said:
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=said, stderr=said, cwd=ROOT)
        peak = 0
        while process.poll() is None:
            with contextlib.suppress(OSError, TypeError):  # it has ended
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf8")
                peak = max(peak, int(re.search(r"VmHWM:\s*(\d+)", status)[1]))  # type: ignore[index]
            time.sleep(POLL_SECONDS)
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if process.returncode != 0:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said.read()[-3000:]}")
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 2), "cpu_seconds": round(busy, 2), "peak_bytes": 1024 * peak}


def long_run(folder: Path, steps: int) -> dict[str, float]:
    """Make a run of many steps."""
    words = ["--platform", "cpu", "--gpus", "1", "--model", "llama", "--steps", str(steps), "--output-dir", str(folder)]
    found = measured([sys.executable, str(LAUNCHER), *words], FAKE_WORDS=json.dumps(["steps", str(steps)]))
    (written,) = folder.glob("runs/*/steps.jsonl")
    texts = written.read_text(encoding="utf8").splitlines()
    with written.open("w", encoding="utf8") as file:  # no real run has steps of one length
        for number, text in enumerate(texts):
            step = {**json.loads(text), "step_seconds": 0.5 * (1 + number * 7919 % 997 / 1e5)}
            file.write(json.dumps(step) + "\n")
    return found


def main() -> int:
    """Exit status: 0, 1 where a figure misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=RECORD, metavar="FILE")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "version": own_version(),
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "python": sys.version.split()[0],
        "steps": options.steps,
    }
    with tempfile.TemporaryDirectory(prefix="tprimat-large-") as folder:
        place = Path(folder)
        program = [sys.executable, "-m", "tprimat"]
        record["launcher"] = long_run(place / "long", options.steps)
        record["compare"] = measured([*program, "compare", "--results-dir", str(place / "long"), "--output", f"{folder}/c.png"])
    write_atomically(options.output, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return 0 if record["launcher"]["peak_bytes"] < LAUNCHER_BYTES and record["compare"]["seconds"] < COMPARE_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
