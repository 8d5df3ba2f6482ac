"""./benchmark.py with real training on a CPU: what a run leaves behind, however it ends.

Training starts five times in this file; everything that needs no rank stands in test_run_command.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
from commands import run_command
from launch.a_launch import processes_with, wait_for

from tprimat.records.discover import read_result
from tprimat.records.schema import StartUp
from tprimat.records.store import RunDirectory

ROOT = Path(__file__).parents[2]
SHORT = ["--gpus", "1", "--micro-batch-size", "1", "--global-batch-size", "2", "--sequence-length", "32", "--set", "data=mock"]
WITHOUT_STAGES = ["--set", "parallelism.balanced.qwen.cpu.pipeline_model_parallel_size=1"]


def start(*arguments, script="benchmark.py", environment=None, **how):
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    clean = {key: value for key, value in os.environ.items() if key not in {"PARALLEL", "OUTPUT_DIR"}}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=clean | (environment or {}), text=True, **{**pipes, **how})


def end_of(process, seconds=300):
    out, err = process.communicate(timeout=seconds)
    assert "Traceback" not in out + err
    return process.returncode, out, err


def runs_in(folder, model="*"):
    return [RunDirectory(path) for path in sorted((folder / "runs").glob(f"*-{model}-*"))]


def has_steps(folder, model):
    return lambda: any(run.steps_file.exists() and run.steps_file.stat().st_size for run in runs_in(folder, model))


def check_against_the_schemas(folder):
    """Every file that a run wrote, without the profiler's traces. Returns: how many documents were looked at."""
    kinds = {"run.json": "run", "plan.json": "plan", "steps.jsonl": "step", "telemetry.jsonl": "telemetry"}
    validators, seen = {}, 0
    for path in sorted(set(folder.rglob("*.json*")) - set(folder.glob("profile*/**/*.json")) - set(folder.glob("profile_*"))):
        kind = "benchmark" if path.name.startswith("benchmark_") else kinds[path.name]
        if kind not in validators:
            schema = json.loads((ROOT / "schemas" / f"{kind}.schema.json").read_text())
            validators[kind] = jsonschema.Draft202012Validator(schema)
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            validators[kind].validate(json.loads(text))
            seen += 1
    return seen


PROFILED = [
    word
    for key in ("enabled=true", "schedule.wait=0", "schedule.warmup=0", "schedule.active=1")
    for word in ("--set", f"profiling.{key}")
]


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """A run, and then another of one profiled step on two ranks, through another script, into the same folder."""
    folder = tmp_path_factory.mktemp("repeated")
    first = end_of(start("--model", "llama", "--steps", "2", *SHORT, "--output-dir", folder, "--json"))
    environment = {"PARALLEL": "balanced", "OUTPUT_DIR": str(folder)}
    flags = (*SHORT, "--gpus", "2", *WITHOUT_STAGES, *PROFILED)
    second = end_of(start("--steps", "1", *flags, script="pretrain_qwen.py", environment=environment))
    return folder, first, second


def test_a_run_that_completes_exits_0_and_prints_its_summary_as_one_document(repeated):
    folder, (code, out, err), _ = repeated
    assert code == 0, err
    assert json.loads(out)["runs"]
    log = (folder / "training_llama.log").read_text()
    assert [line.split()[-1] for line in log.splitlines() if line.startswith("tprimat start-up: ")] == list(get_args(StartUp))
    assert "Using parallelism strategy: minimal_communication\nParallelism: TP=1, PP=1, DP=1, GradAccum=2\n" in err


def test_a_training_script_started_directly_takes_strategy_and_folder_from_the_environment(repeated):
    folder, _, (_, out, err) = repeated
    (run,) = runs_in(folder, "qwen")
    assert run.read_run().strategy == "balanced"
    assert "Parallelism: TP=2, PP=1, DP=1, GradAccum=2\n" in err
    assert "qwen · balanced" in out


def test_the_log_has_a_line_for_each_step_from_which_the_figures_can_be_extracted(repeated, tmp_path):
    folder, _, _ = repeated
    log, (run,) = folder / "training_llama.log", runs_in(folder, "llama")
    assert log.read_text().count("elapsed time per iteration") == 2
    done = run_command("extract_primus_metrics.py", "--log-file", log, "--model-name", "llama", "--output", tmp_path / "x.json")
    assert done.returncode == 0, done.stderr
    extracted, measured = read_result(tmp_path / "x.json"), read_result(run.path)
    for field in ("run_id", "machine", "strategy", "workload", "outcome", "profiled_steps"):
        assert getattr(extracted.run, field) == getattr(measured.run, field)
    for field in ("step", "step_seconds", "tokens", "loss", "grad_norm", "learning_rate", "finite", "peak_allocated_bytes"):
        ours, theirs = ([getattr(step, field) for step in result.steps] for result in (measured, extracted))
        assert all(their == our or their == pytest.approx(our, rel=1e-5) for our, their in zip(ours, theirs, strict=True))


def test_every_file_that_a_run_wrote_is_what_its_schema_says(repeated):
    folder, _, _ = repeated
    assert check_against_the_schemas(folder) == 2 + 2 * (1 + 1) + 2 + 1  # benchmark files; plan and run of each; steps


def test_the_evidence_comes_from_the_running_framework_and_agrees_with_the_plan(repeated):
    folder, _, _ = repeated
    for run in runs_in(folder):
        record = run.read_run()
        assert record.mismatches == ()
        assert record.evidence.source == "running_framework"
        assert record.evidence.workload.tensor_parallel == record.workload.tensor_parallel
        assert record.evidence.tokens_per_step == 2 * 32


def test_a_rank_killed_in_the_middle_fails_its_run_and_keeps_its_steps(tmp_path):
    word = uuid.uuid4().hex
    process = start("--model", "llama", "--steps", "500", *SHORT, "--output-dir", tmp_path, environment={"A_TEST": word})
    wait_for(has_steps(tmp_path, "llama"))
    (run,) = runs_in(tmp_path, "llama")
    ranks = [pid for pid in processes_with(word) if is_rank(pid)]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    code, out, err = end_of(process)
    record = run.read_run()
    assert (code, record.outcome) == (1, "failed"), err
    assert "SIGKILL" in record.cause
    assert 1 <= len(run.read_steps()) < 500
    assert record.cause in out
    assert json.loads((tmp_path / "benchmark_cpu_llama.json").read_text())["run"]["outcome"] == "failed"
    assert check_against_the_schemas(tmp_path) >= 4
    assert processes_with(word) == set()


def test_a_rank_that_alone_is_told_to_stop_ends_the_run_at_once(tmp_path):
    """Lightning's handler would wait in a broadcast for the ranks that nobody told."""
    word = uuid.uuid4().hex
    process = start(
        "--model", "llama", "--steps", "2000", *SHORT, "--gpus", "2", "--output-dir", tmp_path, environment={"A_TEST": word}
    )
    wait_for(has_steps(tmp_path, "llama"))
    os.kill(max(pid for pid in processes_with(word) if is_rank(pid)), signal.SIGTERM)
    process.wait(timeout=60)
    assert (end_of(process)[0], runs_in(tmp_path, "llama")[0].read_run().outcome) == (1, "failed")


def is_rank(pid):
    """A process of the training script itself, not torchrun, whose command line has the script's name as well."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return any(word.endswith("pretrain_llama.py") for word in words[:3]) and not words[1].endswith("rendezvous.py")


def test_ctrl_c_keeps_what_was_measured_starts_nothing_more_and_leaves_no_process(tmp_path):
    word = uuid.uuid4().hex
    process = start("--model", "all", "--steps", "2000", *SHORT, "--output-dir", tmp_path, environment={"A_TEST": word})
    wait_for(has_steps(tmp_path, "llama"))
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    seconds = time.monotonic() - asked
    code, out, err = end_of(process)
    (run,) = runs_in(tmp_path)
    record = run.read_run()
    assert (code, record.outcome) == (130, "interrupted")
    left = "stopped: 2 of 2 runs are left; the same call with --resume continues from here"
    assert left in err.splitlines()
    assert run.read_steps()
    assert "interrupted" in out
    assert record.ended_at is not None
    assert json.loads((tmp_path / "benchmark_cpu_llama.json").read_text())["run"]["outcome"] == "interrupted"
    assert check_against_the_schemas(tmp_path) > 3
    assert processes_with(word) == set()
    assert seconds < 10


def can_mount():
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") and subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="a small disk of its own needs the right to mount")
def test_a_full_disk_ends_the_run_with_its_reason_and_keeps_whole_steps(tmp_path):
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    train = f"{sys.executable} {ROOT}/benchmark.py --model llama --steps 400 {' '.join(SHORT)} --output-dir {disk}/out"
    # The disk holds no 400 steps even if the launcher is slow with the logs, which take most of it otherwise.
    script = f"mount -t tmpfs -o size=80k tmpfs {disk} && {{ {train}; code=$?; cp -r {disk}/out {copy}; exit $code; }}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "not started" not in done.stderr
    (run,) = runs_in(copy)
    steps = run.read_steps()
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert 1 <= len(steps) < 400
    ended = run.read_run()
    assert (ended.outcome, ended.cause.rpartition(": ")[2]) == ("failed", "No space left on device.")
    assert "failed" in done.stdout
