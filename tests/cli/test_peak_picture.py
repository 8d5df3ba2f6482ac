"""visualize_peak_throughput.py as a user starts it: real processes, real pictures."""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tprimat.cli.main import start
from tprimat.records.schema import Machine, ProbeRecord
from tprimat.records.store import RunDirectory, append_probe
from tprimat.report.plots import peak

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
TITLES = (
    "1  Peak throughput of the whole machine",
    "2  The same for each GPU",
    "3  Peak compute of the whole machine",
    "4  Compute of each GPU",
    "5  Effect of the configuration",
    "6  Machine against machine",
    "7  Utilization, every configuration",
    "8  Mean step time",
    "9  Memory against speed",
)


def draw(*arguments, cwd):
    command = [sys.executable, ROOT / "visualize_peak_throughput.py", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def words_of(path):
    """What a reader sees in a picture; matplotlib keeps each text as a comment beside its outlines."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    return {(node.text or "").strip() for node in ET.parse(path, parser).iter() if node.tag is ET.Comment}


def test_nine_panels_with_figures_counts_and_a_refusal(tmp_path):
    done = draw("--results-dir", RUNS / "published", "--output", "peak.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = words_of(tmp_path / "peak.svg")
    assert set(TITLES) <= words
    assert "87,933 (n = 1 run, 11 steps)" in words
    assert "43.5 %" in words
    assert any("not compared, different: tokens a step" in text for text in words)
    assert "Peak throughput: qwen on 8 x MI300X, 87,933 tokens/s, 36.7 % of its matrix peak" in words


def test_the_default_is_the_png_that_users_know(tmp_path):
    shutil.copytree(RUNS / "cpu", tmp_path / "output")
    done = draw(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "peak_throughput_analysis.png").read_bytes().startswith(b"\x89PNG")


def test_on_a_processor_the_panels_say_why_they_are_empty(tmp_path):
    assert draw("--results-dir", RUNS / "cpu", "--output", "cpu.svg", cwd=tmp_path).returncode == 0
    words = words_of(tmp_path / "cpu.svg")
    assert "a CPU has no published matrix peak to compare with" in words
    assert "4  Compute of each process" in words
    assert "not counted on a CPU" in words
    assert not words & {"0.5", "0.50", "1.25", "1.50"}  # numbers on an axis with nothing on it


def test_the_fastest_product_probed_on_the_machine_is_a_line(tmp_path):
    shutil.copytree(RUNS / "h100", tmp_path / "output")
    for folder in (tmp_path / "output" / "runs").iterdir():
        place = RunDirectory(folder)
        place.write_run(replace(place.read_run(), software={"torch": "2.8.0"}))
    machine = Machine(platform="cuda", accelerator="NVIDIA H100 80GB HBM3", gpus_per_node=1, nodes=1)
    flop = 2 * 8192**3
    probe = ProbeRecord(
        kind="gemm",
        shape={"m": 8192, "n": 8192, "k": 8192},
        dtype="bf16",
        seconds=(flop / 700e12,) * 5,
        flop=flop,
        machine=machine,
        software={"torch": "2.8.0"},
        started_at="2026-01-01T00:00:00Z",
    )
    append_probe(tmp_path / "output" / "probes.jsonl", probe)
    assert draw("--output", "probed.svg", cwd=tmp_path).returncode == 0
    words = words_of(tmp_path / "probed.svg")
    assert any(text.startswith("700: ") and text.endswith(" %") for text in words)
    assert "(black: fastest matmul probed, and the share of it)" in words


def test_the_words_under_neighbouring_panels_keep_apart(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(peak, "save", lambda made, path: (made.savefig(path), drawn.append(made)))
    measured = ROOT / "results" / "h200"
    folders = [str(measured / name) for name in ("engine", "nemo", "two-gpus/engine")]
    probes = str(measured / "probes-1gpu")
    assert (
        start(
            "peak-picture",
            "visualize_peak_throughput.py",
            ["--results-dir", *folders, "--probes", probes, "--output", str(tmp_path / "peak.png")],
        )
        == 0
    )
    for row in drawn[0].subfigs:
        words = [axes.xaxis.label.get_window_extent() for axes in row.axes]
        assert all(left.x1 < right.x0 for left, right in pairwise(words))


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--output", "x.gif"], "not a picture"), (["--results-dir", "no"], "No result")]
)
def test_a_mistake_is_explained_without_a_traceback(tmp_path, arguments, words):
    shutil.copytree(RUNS / "cpu", tmp_path / "output")
    done = draw(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
