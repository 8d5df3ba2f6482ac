"""Measure what extract_primus_metrics.py costs on a long log: seconds, and peak memory of its process.

python benchmarks/log_extraction.py                        100,000 steps in 1 GB: the target is 20 s and 500 MB
python benchmarks/log_extraction.py --steps 1000000 --megabytes 0
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRIMUS_LOG = ROOT / "tests" / "logs" / "primus_core_head.log"
OTHER_LINE = "[20260822 07:39:10][rank-3/8][INFO ] [--module_utils.py:227] : some words about a bucket of parameters and a rank\n"
CHILD = (
    "import os, re, sys; from tprimat.cli.main import start; status = start('extract', 'extract', sys.argv[1:]); "
    "peak = re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]; "
    "print('cost', status, peak, os.times().user + os.times().system)"
)


def write_log(path: Path, steps: int, size: int) -> None:
    """Write a Primus log of about `size` bytes; at least one line per step."""
    step_line = PRIMUS_LOG.read_text(encoding="utf8").splitlines()[3] + "\n"
    others = OTHER_LINE * max(0, (size // steps - len(step_line)) // len(OTHER_LINE))
    with path.open("w", encoding="utf8") as file:
        for step in range(3, steps + 3):
            line = step_line.replace("iteration        3/", f"iteration {step:8d}/")
            file.write(re.sub(r"\(ms\): [\d.]+", f"(ms): {9800 + step % 997 / 10:.1f}", line, count=1) + others)


def main() -> int:
    """Exit status of the extraction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--megabytes", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "train.log")
        write_log(log, options.steps, options.megabytes * 10**6)
        flags = ("--log-file", str(log), "--model-name", "llama", "--gpu", "MI300X", "--output", str(Path(folder, "out.json")))
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", CHILD, *flags], cwd=ROOT, check=True, capture_output=True, text=True)
        seconds = time.monotonic() - started
        status, peak_kib, processor_seconds = done.stdout.rsplit("cost ", 1)[1].split()
        megabytes = log.stat().st_size / 1e6
    print(done.stdout.rsplit("cost ", 1)[0], end="")
    cost = f"{seconds:.1f} s, {float(processor_seconds):.1f} s of CPU time, {int(peak_kib) * 1024 / 1e6:.0f} MB of memory"
    print(f"{'cost':<11} {cost} for {megabytes:,.0f} MB of log")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
