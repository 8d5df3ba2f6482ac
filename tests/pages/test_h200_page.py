"""benchmarks/results/h200.md: its tool includes later measurements."""

import importlib.util
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs.make_runs import a_run, step_times, steps_of, write_run

from benchmarks.finetune_qwen3.embedded import MODEL
from tprimat.core.models import model_shape
from tprimat.records.schema import Machine
from tprimat.records.store import append_probe, read_probes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "records" / "h200"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The tool, on a copy of the probes and its own page."""
    spec = importlib.util.spec_from_file_location("h200_page", ROOT / "tools" / "h200_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for folder in RESULTS.glob("probes-*"):
        shutil.copytree(folder, tmp_path / "results" / folder.name)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(sys, "argv", ["h200_page.py", "--check"])
    return module


def test_a_page_older_than_its_records_is_noticed(tool):
    tool.PAGE.write_text(tool.text(), encoding="utf8")
    assert tool.main() == 0
    file = tool.RESULTS / "probes-4gpu" / "probes.jsonl"
    first = next(probe for probe in read_probes(file) if probe.kind == "all_reduce")
    append_probe(file, replace(first, started_at="2027-01-01T00:00:00+00:00", seconds=(1.0,) * 10))
    assert tool.main() == 1


def test_ddp_on_four_and_trainings_of_qwen3_appear_once_they_are_recorded(tool):
    file = tool.RESULTS / "probes-4gpu" / "probes.jsonl"
    records = read_probes(file)
    one = next(probe for probe in records if probe.kind == "ddp_step" and probe.shape["ranks"] == 1 and probe.variant == "7B")
    four = {"machine": replace(one.machine, gpus_per_node=4), "shape": one.shape | {"ranks": 4}, "flop": 4 * one.flop}
    slower = tuple(seconds / 0.9 for seconds in one.seconds)
    append_probe(file, replace(one, **four, seconds=slower, started_at="2027-01-01T00:00:00+00:00"))
    machine = Machine(platform="cuda", accelerator="NVIDIA H200", gpus_per_node=4, nodes=1)
    run = a_run("q", model=MODEL, shape=model_shape("qwen3-8b"), machine=machine, data_parallel=4, sequence_tokens=8192)
    write_run(tool.RESULTS / MODEL / "embedded-full-bf16", run, steps_of(run, step_times(40.0, 3), 3))
    text = tool.text()
    assert re.search(r"\| 7B \| 4 \|.* 90\.0 % \|", text)
    assert "| embedded-full-bf16 | bf16 | 4 |" in text
