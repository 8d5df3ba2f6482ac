"""./benchmark.py --engine megatron-lm: torchrun starts pretrain_gpt.py of MEGATRON_PATH, here one that only prints."""

import json
from pathlib import Path

import pytest
from commands import FAKE_PACKAGES, only_run, run_command, run_script
from fake_megatron_lm import MILLISECONDS, make_clone

from tprimat.engines.megatron_lm import MODULES, NEEDED

WORDS = ("--model", "llama", "--engine", "megatron-lm", "--platform", "nvidia", "--parallel", "balanced", "--gpus", "2")


def test_its_console_becomes_a_record_that_proves_the_strategy(tmp_path):
    for module in MODULES:
        (tmp_path / "packages" / module).mkdir(parents=True)
    machine = {
        "PYTHONPATH": f"{FAKE_PACKAGES}:{tmp_path / 'packages'}",
        "FAKE_GPUS": json.dumps([{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}] * 2),
        "MEGATRON_PATH": str(make_clone(tmp_path / "Megatron-LM", Path(__file__).parent.parent)),
        "OUTPUT_DIR": str(tmp_path / "out"),
    }
    done = run_script("benchmark.py", *WORDS, "--steps", "8", "--force", environment=machine)
    assert done.returncode == 0, done.stderr
    record, folder = only_run(tmp_path / "out")
    facts = (record["engine"], record["outcome"], record["mismatches"], record["clock"])
    assert facts == ("megatron-lm", "completed", [], "framework")
    assert record["evidence"]["workload"]["tensor_parallel"] == 2
    assert record["software"]["megatron-core"] == "0.19.1"  # the clone's, not the installed one
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [step["step_seconds"] for step in steps[1:]] == pytest.approx([MILLISECONDS / 1e3] * 7)  # the mean is undone


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"pretrain_gpt.py": ""}, "There is no megatron/core/datasets/Makefile in"),
        ({**dict.fromkeys(NEEDED, ""), "pyproject.toml": 'requires-python = ">=3.99"'}, "needs Python 3.99 or newer"),
        (dict.fromkeys(NEEDED, ""), "The Python module transformer_engine is not installed"),
    ],
)
def test_what_a_start_would_lack_is_said_before(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = run_command("benchmark.py", *WORDS, environment={"MEGATRON_PATH": str(tmp_path)})
    assert done.returncode == 2
    assert said in done.stderr
