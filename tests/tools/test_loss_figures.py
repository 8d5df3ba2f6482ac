"""tools/loss_figures.py: losses in fp8 beside those in bf16 of the same layout."""

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from loss_figures import losses  # noqa: E402

RECORDS = ROOT / "benchmarks" / "records" / "h200" / "in-turn"


@pytest.fixture
def results(tmp_path):
    for program in ("megatron", "transformer_engine"):
        for layout in ("cut_mbs4", "cut_mbs4_fp8"):
            shutil.copytree(RECORDS / program / layout, tmp_path / "in-turn" / program / layout)
    return tmp_path


def cells(results):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in losses(results).splitlines()[2:]]


def test_a_loss_that_leaves_bf16_shows_in_its_half_of_the_steps(results):
    for file in (results / "in-turn" / "megatron" / "cut_mbs4_fp8").rglob("benchmark_*.json"):
        document = json.loads(file.read_text(encoding="utf8"))
        document["steps"][1]["loss"] *= 1.5
        file.write_text(json.dumps(document), encoding="utf8")
    wide, ours, _ = cells(results)
    assert wide[:3] == ["`cut_mbs4`", "with Transformer Engine's layers", "3"]
    assert ours[:3] == ["`cut_mbs4_fp8`", "embedded engine", "3"]
    assert float(ours[3].removesuffix(" %")) == pytest.approx(50, abs=0.5)
    assert float(ours[4].removesuffix(" %")) < 5


def test_a_layout_that_ran_in_one_dtype_only_is_left_out(results):
    shutil.rmtree(results / "in-turn" / "transformer_engine" / "cut_mbs4")
    assert cells(results) == []


def test_delayed_scaling_stands_beside_current_scaling(results):
    folder = Path("in-turn-delayed", "transformer_engine", "cut_mbs4_fp8")
    shutil.copytree(RECORDS.parent / folder, results / folder)
    *_, current, delayed = cells(results)
    assert [current[1], delayed[1]] == ["with Transformer Engine's layers", "with Transformer Engine's layers, delayed scaling"]
    assert float(current[4].removesuffix(" %")) < float(delayed[4].removesuffix(" %"))
