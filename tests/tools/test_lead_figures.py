"""tools/lead_figures.py: a ratio compares one configuration per side, on one machine."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from lead_figures import answer, leads  # noqa: E402

SERIES = "with-transformer-engine"
RECORDS = ROOT / "benchmarks" / "records" / "h200" / SERIES


@pytest.fixture
def results(tmp_path):
    for program in ("megatron", "transformer_engine"):
        shutil.copytree(RECORDS / program / "dp_mbs4", tmp_path / SERIES / program / "dp_mbs4")
    return tmp_path


def change(results, program, rounds, **machine):
    for file in sorted((results / SERIES / program / "dp_mbs4").rglob("benchmark_*.json"))[:rounds]:
        document = json.loads(file.read_text(encoding="utf8"))
        document["run"]["machine"] |= machine
        file.write_text(json.dumps(document), encoding="utf8")


def last_cells(results):
    return [line.rstrip("| ").rpartition("| ")[2] for line in leads(results).splitlines()[2:]]


def test_a_ratio_has_its_interval(results):
    assert "embedded engine / this" in leads(results)
    ours, other = last_cells(results)
    assert ours == "–"
    assert re.fullmatch(r"1\.\d{3} \[1\.\d{3}, 1\.\d{3}\]", other)


@pytest.mark.parametrize("machine", [{"power_limit_watts": 650.0}, {"driver": "1.2"}], ids=lambda machine: next(iter(machine)))
def test_runs_of_unlike_machines_have_no_ratio(machine, results):
    change(results, "transformer_engine", None, **machine)
    assert len(last_cells(results)) == 2
    assert "embedded engine / this" not in leads(results), "a column without a value is left out"
    assert answer(results) == "Nothing is recorded yet."


@pytest.mark.parametrize("program", ["megatron", "transformer_engine"])
def test_two_configurations_of_a_program_are_named_and_neither_is_chosen(program, results):
    change(results, program, 1, power_limit_watts=650.0)
    with pytest.raises(SystemExit, match=rf"{program}/dp_mbs4 holds 2 configurations that count, not one"):
        leads(results)


def test_the_answer_counts_what_ran_often_enough_and_names_where_the_engine_is_slower(results):
    ((ratio, low, high),) = re.findall(r"(1\.\d{3}) \[(1\.\d{3}), (1\.\d{3})\]", leads(results))
    intro, rows = answer(results).split("\n\n")
    assert intro == "On H200 SXM at 700 W, in comparisons with at least 3 runs a side:"
    assert rows.splitlines()[2:] == [f"| Transformer Engine 2.11's layers | bf16 | 1 | {ratio} | {low} to {high} |"]
    for program in ("megatron", "transformer_engine"):
        shutil.copytree(RECORDS / program / "tp4_mbs4", results / SERIES / program / "tp4_mbs4")
    assert re.search(r"In `tp4_mbs4` .* runs at 0\.\d{3} times the speed of Tr.* \(1 run a side\)\.$", answer(results))
