"""Training Qwen3 8B in the suite: the commands, what torchtune's logs become, and a failure as a record."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from tprimat.cli import finetune, options, qwen3, torchtune
from tprimat.cli.qwen3 import Training
from tprimat.engines.base import Command
from tprimat.records.schema import Machine

GPUS = Machine(platform="cuda", accelerator="NVIDIA H200", gpus_per_node=8, nodes=1)
ON_GPUS = Training(machine=GPUS, ranks=8, steps=20, seconds=None)
ON_A_PROCESSOR = Training(machine=None, ranks=2, steps=4, seconds=None)
LOG = Path(__file__).parents[1] / "logs" / "torchtune_qwen3_lora.log"


def test_the_command_of_fp8_is_torchtunes_full_recipe_with_its_switch(tmp_path):
    inputs = torchtune.inputs_of(tmp_path, "checkpoint")
    argv = torchtune.command_of("full-fp8", tmp_path, inputs, ON_GPUS).argv
    assert argv[1:9] == (
        "-m",
        "torchtune._cli.tune",
        "run",
        "--nnodes",
        "1",
        "--nproc_per_node",
        "8",
        "full_finetune_distributed",
    )
    assert {"enable_fp8_training=True", "batch_size=14", "tokenizer.max_seq_len=8192", "dataset.packed=True"} <= set(argv)
    assert {"max_steps_per_epoch=20", "checkpointer.checkpoint_dir=checkpoint"} <= set(argv)
    assert "enable_fp8_training=True" not in torchtune.command_of("full-bf16", tmp_path, inputs, ON_GPUS).argv


@pytest.mark.parametrize("precision", qwen3.PRECISIONS)
def test_the_embedded_engine_trains_the_published_workload(tmp_path, precision):
    from tprimat.runner.session import prepare

    argv = qwen3.command_of(precision, tmp_path, ON_GPUS).argv
    assert argv[1:3] == ("-m", "tprimat.cli.benchmark")
    asked = options.parser().parse_args([*argv[3:], "--platform", "nvidia", "--dry-run"])
    (plan,) = prepare(asked).plans
    assert (plan.shape.name, plan.engine, plan.precision, plan.recompute) == ("qwen3-8b", "megatron", precision, "full")
    assert (plan.batch.global_batch_sequences, plan.batch.sequence_tokens, plan.layout.data) == (14 * 8, 8192, 8)


def test_what_is_missing_is_said_with_the_command_that_gets_it():
    assert torchtune.INSTALL in torchtune.why_not(None)


def test_a_torchtune_that_knows_no_qwen3_is_not_started(tmp_path, monkeypatch):
    (tmp_path / "torchtune" / "models").mkdir(parents=True)
    (tmp_path / "torchtune" / "__init__.py").write_text("raise ImportError('never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert "knows no Qwen3" in torchtune.why_not(str(tmp_path))
    (tmp_path / "torchtune" / "models" / "qwen3").mkdir()
    assert "holds no checkpoint" in torchtune.why_not(str(tmp_path))
    assert "--checkpoint random" in torchtune.why_not(None)
    assert torchtune.why_not("random") is None
    (tmp_path / "vocab.json").write_text("{}")
    assert torchtune.why_not(str(tmp_path)) is None


def a_job(program, name="torchtune-lora-bf16", read=lambda: None):
    return finetune.Job(
        name=name, engine="torchtune", dtype="bf16", command=lambda _: Command(argv=(sys.executable, "-c", program)), read=read
    )


def test_a_log_of_torchtune_becomes_a_record_and_the_record_a_row(tmp_path):
    folder = finetune.folder_of(tmp_path, "torchtune-lora-bf16")
    program = f"import pathlib, shutil; p = pathlib.Path({str(folder)!r}, 'logs'); p.mkdir(parents=True, exist_ok=True); "
    program += f"shutil.copy({str(LOG)!r}, p / 'log_1.txt')"
    job = a_job(program, read=lambda: torchtune.read_log(folder, 2, "AMD Instinct MI350X"))
    told = []
    finetune.carry_out(job, tmp_path, ON_A_PROCESSOR, told.append)
    assert told[-1] == "torchtune-lora-bf16: completed"
    text = finetune.section(tmp_path, "torchtune is not installed.")
    row = next(line for line in text.splitlines() if line.startswith("| torchtune-lora-bf16"))
    assert "| 2 |" in row
    assert "torchtune was not run" not in text
    finetune.carry_out(job, tmp_path, ON_A_PROCESSOR, told.append)
    assert told[-1] == "torchtune-lora-bf16: done before."


def test_a_failure_is_a_record_with_its_cause_and_the_next_start_tries_again(tmp_path):
    job = a_job("raise ValueError('no such configuration: qwen3/8B_lora')")
    for _ in range(2):
        finetune.carry_out(job, tmp_path, ON_A_PROCESSOR, lambda line: None)
    (result,) = finetune.results_in(finetune.folder_of(tmp_path, job.name))
    assert (result.run.outcome, result.run.engine, result.run.matmul_dtype) == ("failed", "torchtune", "bf16")
    assert "no such configuration: qwen3/8B_lora" in result.run.cause
    assert "- torchtune-lora-bf16: failed: " in finetune.section(tmp_path)


def hint_of(job, output, seconds):
    """Of the record that a training leaves which its time did not suffice for."""
    training = dataclasses.replace(ON_A_PROCESSOR, seconds=seconds)
    finetune.carry_out(job, output, training, lambda line: None)
    (result,) = finetune.results_in(finetune.folder_of(output, job.name))
    assert result.run.outcome == "timed_out"
    return result.run.hint


def test_a_training_that_the_suite_cut_says_which_flag_gives_it_more_time(tmp_path, monkeypatch):
    jobs = finetune.jobs_of(tmp_path, ON_A_PROCESSOR, None, set())
    embedded = next(job for job in jobs if job.name == "embedded-full-bf16")
    assert "raise --time-budget" in hint_of(embedded, tmp_path, 1.0)
    monkeypatch.setattr(finetune, "TO_STOP_ITSELF", 0)
    assert "raise --time-budget" in hint_of(a_job("import time; time.sleep(60)"), tmp_path, 0.5)
    page = finetune.section(tmp_path)
    assert "larger `--time-budget`" in page
    assert "run_timeout_seconds" not in page


def test_a_process_that_ends_well_and_leaves_no_log_is_a_failure(tmp_path):
    folder = finetune.folder_of(tmp_path, "torchtune-lora-bf16")
    job = a_job("pass", read=lambda: torchtune.read_log(folder, 2, "AMD Instinct MI350X"))
    finetune.carry_out(job, tmp_path, ON_A_PROCESSOR, lambda line: None)
    assert "torchtune left no log" in finetune.section(tmp_path)


def test_without_records_the_page_says_why(tmp_path):
    assert "torchtune was not run: it is not installed." in finetune.section(tmp_path, "it is not installed.")
    assert "Not measured yet." in finetune.section(tmp_path)
