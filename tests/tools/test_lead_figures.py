"""tools/lead_figures.py: a ratio compares one configuration per side, on one machine."""

import json
import re
import shutil
import sys
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from lead_figures import DELAYED, answer, choices_of_steps, earlier_leads, leads  # noqa: E402

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
    ours, other = last_cells(results)
    assert ours == "–"
    assert re.fullmatch(r"1\.\d{3} \[1\.\d{3}, 1\.\d{3}\]", other)


@pytest.mark.parametrize("machine", [{"power_limit_watts": 650.0}, {"driver": "1.2"}], ids=lambda machine: next(iter(machine)))
def test_runs_of_unlike_machines_have_no_ratio(machine, results):
    change(results, "transformer_engine", None, **machine)
    assert last_cells(results) == ["–", "–"]
    assert answer(results) == "Nothing is recorded yet."


@pytest.mark.parametrize("program", ["megatron", "transformer_engine"])
def test_two_configurations_of_a_program_are_named_and_neither_is_chosen(program, results):
    change(results, program, 1, power_limit_watts=650.0)
    with pytest.raises(SystemExit, match=rf"{program}/dp_mbs4 holds 2 configurations that count, not one"):
        leads(results)


def test_a_chain_of_operations_is_no_match_for_a_fused_adam(tmp_path):
    records = RECORDS.parents[1] / "h100" / "earlier"
    for folder in (Path(program, "llama_one_gpu") for program in ("megatron", "transformer_engine")):
        shutil.copytree(records / folder, tmp_path / "in-turn" / folder)
    assert last_cells(tmp_path) == ["–", "–"]
    assert answer(tmp_path) == "Nothing is recorded yet."
    for file in (tmp_path / "in-turn" / "transformer_engine").rglob("benchmark_*.json"):
        document = json.loads(file.read_text(encoding="utf8"))
        document["run"]["engine_options"]["fused_adam"] = True
        file.write_text(json.dumps(document), encoding="utf8")
    assert last_cells(tmp_path)[1].startswith("1.101 [")


def test_a_comparison_that_was_repeated_leaves_the_first_table_for_the_history(results):
    assert earlier_leads(results) == "Nothing is recorded yet."
    before = leads(results)
    newer = results / "in-turn-two-gpus"
    shutil.copytree(results / SERIES, newer)
    assert earlier_leads(results) == before
    shutil.rmtree(results / SERIES / "transformer_engine")
    assert len(leads(results).splitlines()) == len(earlier_leads(results).splitlines()) + 1
    assert leads(results) == before


def test_the_answer_tells_the_other_scaling_from_ours(tmp_path):
    for folder in ("in-turn", DELAYED):
        for program in ("megatron", "transformer_engine"):
            shutil.copytree(RECORDS.parent / folder / program / "cut_mbs4_fp8", tmp_path / folder / program / "cut_mbs4_fp8")
    ratios = [float(cell.split()[0]) for cell in last_cells(tmp_path) if cell != "–"]
    said = re.findall(r"at (\d\.\d{3}) times .*? in (fp8 \w+ \w+ scaling)", answer(tmp_path))
    assert said == [(f"{ratios[0]:.3f}", "fp8 with current scaling"), (f"{ratios[1]:.3f}", "fp8 against delayed scaling")]


def test_a_ratio_that_depends_on_which_steps_count_is_listed_beside_the_others(tmp_path):
    fastest = {}
    for program, layout in product(("megatron", "transformer_engine"), ("dp_mbs1", "dp_mbs4")):
        folder = Path("in-turn-two-gpus", program, layout)
        shutil.copytree(RECORDS.parent / folder, tmp_path / folder)
        files = (json.loads(file.read_text(encoding="utf8")) for file in (tmp_path / folder).rglob("benchmark_*.json"))
        fastest[program, layout] = [min(step["step_seconds"] for step in document["steps"]) for document in files]
    (row,) = choices_of_steps(tmp_path).splitlines()[2:]
    name, gpus, *ratios = (cell.strip() for cell in row.strip("|").split("|"))
    assert (name, gpus) == ("`dp_mbs1`", "2")  # that of dp_mbs4 hardly depends on them
    ours, peer = (geometric_mean(fastest[program, "dp_mbs1"]) for program in ("megatron", "transformer_engine"))
    assert float(ratios[-1].split()[0]) == pytest.approx(peer / ours, abs=1e-3)


def test_the_answer_counts_what_ran_often_enough_and_names_where_the_engine_is_slower(results):
    ((ratio, low, high),) = re.findall(r"(1\.\d{3}) \[(1\.\d{3}), (1\.\d{3})\]", leads(results))
    assert answer(results) == (
        f"On H200 SXM at 700 W, the embedded engine runs at {ratio} times the speed of Transformer Engine's layers in bf16 "
        f"(95 % interval from {low} to {high}): 1 comparison below, at least 3 runs a side."
    )
    for program in ("megatron", "transformer_engine"):
        shutil.copytree(RECORDS / program / "tp4_mbs4", results / SERIES / program / "tp4_mbs4")
    assert re.search(r"In `tp4_mbs4` .* runs at 0\.\d{3} times their speed \(1 run a side\)\.$", answer(results))
