"""tprimat reproduce: the run nearest to a published row, what it should reach, and what a run of it is worth."""

import json
import re
import shlex
from pathlib import Path

import pytest
from commands import run_command

CASES = Path(__file__).parents[2] / "benchmarks" / "records" / "explain-cases"
ROW = "megatron-bridge-2604-llama-3-70b-h100"


def planned(*words):
    done = run_command("benchmark.py", "--dry-run", "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["plans"][0]["workload"]


def test_with_fewer_gpus_a_proxy_keeps_shapes_and_takes_the_degrees_and_layers_that_fit():
    done = run_command("reproduce", ROW, "--dry-run", "--set", "gpu=H100 SXM", "--set", "gpus=4")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    words = shlex.split(first.removeprefix("nearest run: ./benchmark.py "))
    work = planned(*words, "--gpu", "H100 SXM")
    # The row: TP4 PP8 in 80 layers on 64 GPUs, so that one of its stages has 10.
    split = work["shape"]["layers"], work["shape"]["hidden"], work["tensor_parallel"], work["pipeline_parallel"]
    assert split == (10, 8192, 4, 1)
    assert (work["micro_batch_sequences"], work["global_batch_sequences"], work["sequence_tokens"]) == (1, 16, 8192)
    table = {line.split("  ")[0]: float(line.split()[-1]) for line in rest if re.search(r" [+-][\d.]+$", line)}
    assert list(table) == ["model, layout", "global batch", "implementation", "such runs usually take"]
    usual, low, high = (
        int(one.replace(",", ""))
        for one in re.search(r"expected: ([\d,]+) TFLOP/s/GPU, nine of ten runs from ([\d,]+) to ([\d,]+)", done.stdout).groups()
    )
    assert low < usual < high
    assert abs(747.5 + sum(table.values()) - usual) < 2
    assert "Nothing was started or written." in done.stdout


def test_a_row_that_fits_runs_as_it_is():
    done = run_command("reproduce", "dgx-cloud-llama-3.1-8b-bf16", "--dry-run", "--set", "gpu=H100 SXM")
    words = shlex.split(done.stdout.splitlines()[0].removeprefix("nearest run: ./benchmark.py "))
    work = planned(*words, "--gpu", "H100 SXM")
    assert words[words.index("--model") + 1] == "llama"
    assert (work["context_parallel"], work["data_parallel"], work["global_batch_sequences"]) == (2, 4, 128)


@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        ("first-machine/dp2", 0, "within"),
        ("first-machine/late_host", 3, "outside"),
    ],
)
def test_the_exit_status_says_whether_a_run_is_within_the_interval(case, status, said):
    """A usual run on two H100, one whose host was late, and one of whose GPUs another program used."""
    done = run_command("reproduce", "dgx-cloud-llama-3.1-8b-bf16", CASES / case)
    assert done.returncode == status, done.stderr
    assert done.stdout.rstrip().endswith(said)
    assert "TFLOP/s/GPU of dgx-cloud-llama-3.1-8b-bf16" in done.stdout


@pytest.mark.slow
def test_on_a_cpu_a_tiny_proxy_trains(tmp_path):
    words = ("--set", "platform=cpu", "--set", "gpus=2", "--set", "steps=3")
    done = run_command("reproduce", ROW, *words, environment={"OUTPUT_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f"A tiny version of {ROW} trains here; a CPU says nothing of its speed.")
    (record,) = tmp_path.glob("runs/*/run.json")
    run = json.loads(record.read_text())
    ran = run["evidence"]["workload"]
    assert (run["outcome"], ran["tensor_parallel"], run["workload"]["shape"]["layers"]) == ("completed", 2, 1)
