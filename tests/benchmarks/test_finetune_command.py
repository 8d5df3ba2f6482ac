"""python3 -m benchmarks.finetune_qwen3 as its own process."""

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.finetune_qwen3.__main__ import main
from tprimat.records.discover import load_results


def finetune(*arguments):
    command = [sys.executable, "-m", "benchmarks.finetune_qwen3", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def processes_of(folder):
    """Process ids whose command line names the folder."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def until(condition, seconds=200):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "timed out"
        time.sleep(0.05)


def test_a_call_that_was_killed_is_continued_and_a_refusal_is_a_record(tmp_path):
    requested = ("--output", tmp_path, "--train-steps", 3)
    command = [sys.executable, "-m", "benchmarks.finetune_qwen3", *map(str, requested)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        until(lambda: any(file.stat().st_size for file in tmp_path.rglob("steps.jsonl")))
        first.kill()
    until(lambda: not processes_of(tmp_path), 30)
    done = finetune(*requested)
    assert done.returncode == 0, done.stderr
    runs = {result.run.ran.matmul_dtype: result.run for result in load_results([tmp_path])[0] if result.run.outcome != "running"}
    assert runs["bf16"].counts
    assert (runs["fp8"].outcome, runs["fp8"].engine) == ("failed", "megatron")
    text = (tmp_path / "finetune_qwen3.md").read_text(encoding="utf8")
    assert "| embedded-full-bf16 | bf16 | 2 |" in text
    assert "- embedded-full-fp8: failed: fp8 cannot run on a CPU." in text
    assert "torchtune was not run: torchtune is not installed." in text


def test_a_training_that_does_not_exist_cannot_be_skipped(tmp_path, capsys):
    assert main(["--output", str(tmp_path), "--skip", "embeded"]) == 2
    assert "no training 'embeded'" in capsys.readouterr().err


def test_a_page_without_records_says_so(tmp_path):
    assert main(["--output", str(tmp_path), "--page-only"]) == 0
    text = (tmp_path / "finetune_qwen3.md").read_text()
    assert text.startswith("# Training Qwen3 8B\n")
    assert "Not measured yet." in text
