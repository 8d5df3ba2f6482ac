"""./benchmark.py --micro-batch-size auto with real training on a CPU: what is found, and what says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tprimat.plan.schema import read_plan
from tprimat.records.store import RunDirectory

ROOT = Path(__file__).parents[2]
AUTO = ["--model", "llama", "--set", "data=mock", "--steps", "1", "--global-batch-size", "8", "--micro-batch-size", "auto"]
STAGES = ["--gpus", "2", "--sequence-length", "128", "--parallel", "stages"]
STAGES += ["--set", "parallelism.stages.llama.cpu.pipeline_model_parallel_size=2"]


def benchmark(folder, *arguments, limits=""):
    command = [sys.executable, str(ROOT / "benchmark.py"), *AUTO, *arguments, "--output-dir", str(folder)]
    clean = {key: value for key, value in os.environ.items() if key not in {"PARALLEL", "OUTPUT_DIR"}}
    line = ["bash", "-c", f'{limits} exec "$@"', "bash", *command]
    done = subprocess.run(line, env=clean, capture_output=True, text=True, check=False, timeout=400)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def only_run(folder):
    (path,) = (folder / "runs").iterdir()
    return RunDirectory(path)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """Two pipeline stages on a machine that has room for all."""
    folder = tmp_path_factory.mktemp("roomy")
    done = benchmark(folder, *STAGES)
    assert done.returncode == 0, done.stderr
    return folder, done, only_run(folder)


@pytest.fixture(scope="module")
def narrow(roomy, tmp_path_factory):
    """The same with a limit between what 2 sequences and what 8 take."""
    peaks = {trial.micro_batch_sequences: trial.peak_bytes for trial in roomy[2].read_run().micro_batch_search.trials}
    limit = peaks[2] + (peaks[8] - peaks[2]) // 2
    folder = tmp_path_factory.mktemp("narrow")
    done = benchmark(folder, *STAGES, "--set", f"benchmarking.micro_batch_memory_bytes={limit}")
    assert done.returncode == 0, done.stderr
    return folder, done, only_run(folder), limit


def test_a_smaller_memory_gives_a_smaller_micro_batch_that_stays_within_it(narrow):
    *_, run, limit = narrow
    record = run.read_run()
    search = record.micro_batch_search
    assert record.ran.micro_batch_sequences in {2, 4}
    fitting = next(trial for trial in search.trials if trial.micro_batch_sequences == record.ran.micro_batch_sequences)
    assert fitting.peak_bytes <= limit == fitting.limit_bytes
    too_large = {trial.micro_batch_sequences for trial in search.trials if not trial.fits} | set(search.predicted_bytes)
    assert 8 in too_large
    assert all(peak > limit for peak in search.predicted_bytes.values())


def test_all_files_say_that_it_was_auto_and_what_it_became(narrow):
    folder, _, run, _ = narrow
    size = run.read_run().ran.micro_batch_sequences
    plan = read_plan(run.plan_file)
    assert (plan.workload.micro_batch_sequences, plan.micro_batch_search) == (size, run.read_run().micro_batch_search)
    document = json.loads((folder / "benchmark_cpu_llama.json").read_text())
    config = document["training_config"]
    assert (config["micro_batch_size"], config["micro_batch_size_asked"]) == (size, "auto")
    jsonschema.validate(document, json.loads((ROOT / "schemas" / "benchmark.schema.json").read_text()))
    trial = json.loads((ROOT / "schemas" / "trial.schema.json").read_text())
    for line in (run.path / "micro_batch" / "1" / "trials.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(line), trial)


def test_the_same_call_again_takes_the_run_that_is_there(narrow):
    folder, _, run, limit = narrow
    again = benchmark(folder, *STAGES, "--set", f"benchmarking.micro_batch_memory_bytes={limit}", "--resume")
    assert again.returncode == 0, again.stderr
    assert "skipped" in again.stderr
    assert only_run(folder).path == run.path


def test_where_nothing_fits_the_run_is_a_failure_with_a_record_and_starts_no_training(tmp_path):
    short = ["--gpus", "1", "--sequence-length", "32", "--set", "benchmarking.micro_batch_memory_bytes=1000000"]
    done = benchmark(tmp_path, *short)
    assert done.returncode == 1
    record = only_run(tmp_path).read_run()
    assert record.outcome == "out_of_memory"
    assert record.cause.startswith("No micro-batch fits: 1 takes ")
    assert "recompute: full" in record.hint
    assert record.hint in done.stdout
    assert only_run(tmp_path).read_steps() == ()
    assert json.loads((tmp_path / "benchmark_cpu_llama.json").read_text())["run"]["outcome"] == "out_of_memory"


def test_a_process_that_really_runs_out_of_memory_is_an_answer_and_no_failed_run(tmp_path):
    larger = ["--gpus", "1", "--sequence-length", "384", "--global-batch-size", "4"]
    done = benchmark(tmp_path, *larger, limits="ulimit -d 1500000;")
    assert done.returncode == 0, done.stderr
    record = only_run(tmp_path).read_run()
    trials = {trial.micro_batch_sequences: trial for trial in record.micro_batch_search.trials}
    assert trials[4].peak_bytes is None
    assert "4 runs out of memory" in done.stderr
    assert record.ran.micro_batch_sequences < 4
    assert trials[record.ran.micro_batch_sequences].fits
