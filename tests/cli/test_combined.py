"""What a call of several runs ends with. The fake trainer takes the place of training."""

import json
import re
from pathlib import Path

import pytest
from changes import groups_of, replace, slowed

from tprimat.cli.main import start
from tprimat.records.discover import load_results
from tprimat.runner.cells import measured_lead

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"


def run(*flags):
    return start("run", "benchmark.py", ["--model", "llama", "--platform", "cpu", "--steps", "4", *flags])


def test_repetitions_end_in_their_mean_and_each_note_is_said_once(trainer, capsys):
    assert run("--runs", "3") == 0
    out = capsys.readouterr().out
    assert out.count("or more make a narrow interval") == 1
    interval = r"(\[\S+, \S+\]|\(n = 3\))"  # the latter where a busy machine makes it too wide to be of use
    assert re.findall(r"^llama .* (mean of 3 runs)$", out, re.MULTILINE) == ["mean of 3 runs"]
    assert re.search(rf"^  throughput +\d\S* {interval} tokens/s/process$", out, re.MULTILINE)


def test_a_repetition_that_failed_keeps_its_number(trainer, capsys):
    trainer["minimal_communication"] = [("raise", "RuntimeError", "the gears broke"), (), ()]
    assert run("--runs", "3") == 1
    numbered = re.findall(r"^  (run \d) ", capsys.readouterr().out, re.MULTILINE)
    assert numbered == ["run 2", "run 3"]


def test_several_strategies_end_in_a_ranking_without_the_run_that_failed(trainer, capsys):
    trainer["balanced"] = ("raise", "RuntimeError", "the gears broke")
    assert run("--parallel", "minimal_communication,balanced,truly_identical") == 1
    out = capsys.readouterr().out
    ranking = out[out.index("llama tiny ") :]
    assert "vs fastest" in ranking
    assert "minimal_communication" in ranking
    assert "truly_identical" in ranking
    assert "balanced" not in ranking
    assert "the gears broke" in out


def test_a_faster_strategy_than_maximum_performance_is_named():
    fast = [result for result in load_results([RUNS / "h100"])[0] if "llama" in result.run.run_id]
    fast = [result for result in fast if result.run.strategy == "minimal_communication"]
    slow = [slowed(one, 1.2, run_id=f"slow-{one.run.run_id}", strategy="maximum_performance") for one in fast]
    (line,) = measured_lead(groups_of(*fast, *slow))
    assert line == "maximum_performance is 16.7 % slower than minimal_communication for llama here."
    on_cpu = [replace(one, run=replace(one.run, machine=replace(one.run.machine, platform="cpu"))) for one in (*fast, *slow)]
    for results in (fast, on_cpu):
        assert list(measured_lead(groups_of(*results))) == []


def test_the_document_has_the_mean_and_its_interval(trainer, capsys):
    assert run("--runs", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (combined,) = document["combined"]
    assert combined["runs"] == 2
    rates = [one["metrics"]["tokens_per_second_per_gpu"]["value"] for one in document["runs"]]
    rate = combined["tokens_per_second_per_gpu"]
    assert rate["value"] == pytest.approx(sum(rates) / 2)
    assert rate["low"] <= rate["value"] <= rate["high"]
