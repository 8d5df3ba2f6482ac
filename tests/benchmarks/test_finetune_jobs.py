"""The trainings of Qwen3 8B: their commands, records of torchtune's logs, and failures as records."""

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks.finetune_qwen3 import embedded, jobs, torchtune_recipes
from benchmarks.finetune_qwen3.embedded import Training
from benchmarks.finetune_qwen3.section import section
from tprimat.cli import run
from tprimat.cli.main import parser_of
from tprimat.engines.base import Command
from tprimat.records.schema import Machine

GPUS = Machine(platform="cuda", accelerator="NVIDIA H200", gpus_per_node=8, nodes=1)
ON_GPUS = Training(machine=GPUS, ranks=8, steps=20, limit_seconds=None)
ON_A_CPU = Training(machine=None, ranks=2, steps=4, limit_seconds=None)
LOG = Path(__file__).parent / "torchtune_qwen3_lora.log"


@pytest.mark.parametrize("precision", embedded.PRECISIONS)
def test_the_embedded_engine_trains_the_published_workload(tmp_path, precision):
    from tprimat.runner.session import prepare

    argv = embedded.embedded_command(precision, tmp_path, ON_GPUS).argv
    assert Path(argv[1]) == embedded.ROOT / "benchmark.py"
    words = [*argv[2:], "--platform", "nvidia", "--dry-run"]
    options = parser_of("run", "benchmark.py").parse_args(words, argparse.Namespace(words=words))
    (plan,) = prepare(run.request_of(options, "run", "./benchmark.py")).plans
    planned = plan.workload.shape.name, plan.engine, plan.workload.matmul_dtype, plan.workload.recompute
    assert planned == ("qwen3-8b", "megatron", precision, "full")
    assert (plan.workload.global_batch_sequences, plan.workload.sequence_tokens, plan.workload.layout.data) == (14 * 8, 8192, 8)


def a_job(program, name="torchtune-lora-bf16", read=lambda: None):
    return jobs.Job(
        name=name, engine="torchtune", dtype="bf16", command=lambda _: Command(argv=(sys.executable, "-c", program)), read=read
    )


def test_a_log_of_torchtune_becomes_a_record_and_the_record_a_row(tmp_path):
    folder = jobs.job_folder(tmp_path, "torchtune-lora-bf16")
    program = f"import pathlib, shutil; p = pathlib.Path({str(folder)!r}, 'logs'); p.mkdir(parents=True, exist_ok=True); "
    program += f"shutil.copy({str(LOG)!r}, p / 'log_1.txt')"
    job = a_job(program, read=lambda: torchtune_recipes.read_steps(folder, 2, "AMD Instinct MI350X"))
    lines = []
    jobs.run_job(job, tmp_path, ON_A_CPU, lines.append)
    assert lines[-1] == "torchtune-lora-bf16: completed"
    text = section(tmp_path, "torchtune is not installed.")
    row = next(line for line in text.splitlines() if line.startswith("| torchtune-lora-bf16"))
    assert "| 2 |" in row
    assert "torchtune was not run" not in text
    jobs.run_job(job, tmp_path, ON_A_CPU, lines.append)
    assert lines[-1] == "torchtune-lora-bf16: done before"


def test_a_failure_is_a_record_with_its_cause_and_the_next_start_tries_again(tmp_path):
    job = a_job("raise ValueError('no such configuration: qwen3/8B_lora')")
    for _ in range(2):
        jobs.run_job(job, tmp_path, ON_A_CPU, lambda line: None)
    (result,) = jobs.results_in(jobs.job_folder(tmp_path, job.name))
    assert (result.run.outcome, result.run.engine, result.run.ran.matmul_dtype) == ("failed", "torchtune", "bf16")
    assert "no such configuration: qwen3/8B_lora" in result.run.cause
    assert "- torchtune-lora-bf16: failed: " in section(tmp_path)
