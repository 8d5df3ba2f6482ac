"""./benchmark.py --engine megatron-lm: torchrun starts pretrain_gpt.py of MEGATRON_PATH, here one that only prints."""

import json
from pathlib import Path

import pytest
from commands import FAKE_PACKAGES, only_run, run_command, run_script
from fake_megatron_lm import MILLISECONDS, make_clone

WORDS = ("--model", "llama", "--engine", "megatron-lm", "--platform", "nvidia", "--parallel", "balanced", "--gpus", "2")


@pytest.fixture
def machine(tmp_path):
    """Variables of a machine with two H100, Transformer Engine and a clone of Megatron-LM."""
    (tmp_path / "packages" / "transformer_engine").mkdir(parents=True)
    (tmp_path / "packages" / "transformer_engine" / "__init__.py").write_text("")
    gpus = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}] * 2
    return {
        "PYTHONPATH": f"{FAKE_PACKAGES}:{tmp_path / 'packages'}",
        "FAKE_GPUS": json.dumps(gpus),
        "MEGATRON_PATH": str(make_clone(tmp_path / "Megatron-LM", Path(__file__).parent.parent)),
        "OUTPUT_DIR": str(tmp_path / "out"),
    }


def test_its_console_becomes_a_record_that_proves_the_strategy(machine, tmp_path):
    done = run_script("benchmark.py", *WORDS, "--steps", "8", "--force", environment=machine)
    assert done.returncode == 0, done.stderr
    record, folder = only_run(tmp_path / "out")
    facts = (record["engine"], record["outcome"], record["mismatches"], record["clock"])
    assert facts == ("megatron-lm", "completed", [], "framework")
    assert record["evidence"]["workload"]["tensor_parallel"] == 2
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [step["step_seconds"] for step in steps[1:]] == pytest.approx([MILLISECONDS / 1e3] * 7)  # the mean is undone


@pytest.mark.parametrize(
    ("there", "missing"), [("LICENSE", "pretrain_gpt.py"), ("pretrain_gpt.py", "megatron/core/datasets/Makefile")]
)
def test_without_a_whole_clone_it_says_what_to_do(tmp_path, there, missing):
    (tmp_path / there).touch()
    done = run_command("benchmark.py", *WORDS, environment={"MEGATRON_PATH": str(tmp_path)})
    assert done.returncode == 2
    assert f"There is no {missing} in" in done.stderr
    assert "git clone" in done.stderr


def test_a_dry_run_shows_the_words(machine):
    done = run_command("benchmark.py", *WORDS, "--dry-run", environment={"MEGATRON_PATH": machine["MEGATRON_PATH"]})
    assert done.returncode == 0, done.stderr
    assert "pretrain_gpt.py --num-layers 32 --hidden-size 4096" in done.stdout
    assert "--tensor-model-parallel-size 2" in done.stdout
