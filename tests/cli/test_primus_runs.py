"""./benchmark.py on a machine with AMD GPUs and Primus, both played by programs on PATH."""

import json

import pytest
from commands import benchmark_on, only_run, run_script
from fake_primus import make_machine


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Runs ./benchmark.py where amd-smi shows eight MI300X and PRIMUS_PATH a fake Primus."""
    there = {**make_machine(tmp_path), "FAKE_PRIMUS": "once", "OUTPUT_DIR": str(tmp_path / "out")}
    return benchmark_on(monkeypatch, "--model", "llama", "--steps", "6", **there)


def test_an_amd_machine_with_primus_trains_with_primus_and_proves_its_strategy(machine, tmp_path):
    done = machine("--platform", "amd", "--parallel", "truly_identical", run=run_script)
    assert done.returncode == 0, done.stderr
    record, folder = only_run(tmp_path / "out")
    how = record["engine"], record["outcome"], record["mismatches"], record["clock"]
    assert how == ("primus", "completed", [], "framework")
    seen = record["evidence"]["workload"]
    assert (seen["tensor_parallel"], seen["sequence_tokens"]) == (4, 2048)
    assert record["machine"]["accelerator"] == "AMD Instinct MI300X OAM"
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert {step["tokens"] for step in steps} == {128 * 2048}
    document = json.loads((tmp_path / "out" / "benchmark_rocm_llama.json").read_text())
    assert document["performance_metrics"]["tokens_per_second_per_gpu"] == pytest.approx(128 * 2048 / 10 / 8)
    assert (folder / "primus.yaml").is_file()


@pytest.mark.parametrize(
    ("act", "mismatch"),
    [
        ("tensor_model_parallel_size=1", "tensor parallel: 4 was asked for, 1 ran"),
        ("seq_length=8192", "sequence length: 2048 was asked for, 8192 ran"),
        ("global_batch_size=640", "global batch: 128 was asked for, 640 ran"),
        ("micro_batch_size=10", "micro batch: 1 was asked for, 10 ran"),
        ("fp8=hybrid", "matmul dtype: bf16 was asked for, fp8 ran"),
        ("no-dump", "tensor parallel: 4 was asked for, the log does not say what ran"),
    ],
)
def test_a_workload_that_did_not_run_is_not_counted(machine, tmp_path, act, mismatch):
    done = machine("--parallel", "truly_identical", FAKE_PRIMUS=act)
    record, _ = only_run(tmp_path / "out")
    assert (done.returncode, record["outcome"], mismatch in record["mismatches"]) == (1, "completed", True)
    assert "was asked for" in done.stdout


FRAGMENTS = "--set platform_optimizations.amd.environment.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; then"


@pytest.mark.parametrize(
    ("act", "outcome", "said"),
    [
        ("oom", "out_of_memory", ("3.31 GiB", FRAGMENTS)),  # from the log of the rank
        ("nan", "diverged", ("no longer finite",) * 2),
        ("killed", "failed", ("SIGKILL",) * 2),
    ],
)
def test_a_primus_run_that_fails_says_why(machine, tmp_path, act, outcome, said):
    done = machine(FAKE_PRIMUS=act)
    (record, folder), (cause, shown) = only_run(tmp_path / "out"), said
    assert (done.returncode, record["outcome"], cause in record["cause"], shown in done.stdout) == (1, outcome, True, True)
    assert (folder / "steps.jsonl").read_text()
