"""benchmarks/engine_speed.py on a CPU: real runs of the embedded engine, alternating with a fake torchtitan."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_TURN = ("--gpus", "2", "--only", "dp_mbs4,tp4_mbs4", "--steps", "3", "--peer-steps", "4")
FAKE = ROOT / "tests" / "fake_packages"
sys.path.insert(0, str(ROOT / "benchmarks"))

from speed_layouts import LAYOUTS, Layout  # noqa: E402


def engine_speed(folder, *words, **variables):
    command = [
        sys.executable,
        str(ROOT / "tests" / "tools" / "engine_speed_on_cpu.py"),
        "--platform",
        "cpu",
        "--output",
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(FAKE), **variables}
    return subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=False, timeout=500)


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """Two rounds of a layout for two processes, and one that does not fit them."""
    folder = tmp_path_factory.mktemp("speed")
    done = engine_speed(folder, *IN_TURN, "--rounds", "2")
    assert done.returncode == 0, done.stderr
    return folder, done, json.loads((folder / "engine_speed.json").read_text())


def test_both_programs_run_in_turn_in_every_round(in_turn):
    *_, rows = in_turn
    runs = [(run["started_at"], row["program"]) for row in rows for run in row["runs"]]
    assert [program for _, program in sorted(runs)] == ["megatron", "torchtitan"] * 2


def test_the_log_of_torchtitan_becomes_a_record_that_proves_the_workload(in_turn):
    folder, _, rows = in_turn
    (row,) = [row for row in rows if row["program"] == "torchtitan"]
    assert len(row["metrics"]) == 2
    for run in row["runs"]:
        assert (run["engine"], run["outcome"], run["mismatches"], run["clock"]) == ("torchtitan", "completed", [], "framework")
        proof = run["evidence"]
        assert (proof["data_parallel"], proof["micro_batch_sequences"], proof["global_batch_sequences"]) == (2, 1, 8)
        assert (proof["matmul_dtype"], proof["source"]) == ("fp32", "log")
    files = sorted(path.relative_to(folder).as_posix() for path in folder.glob("torchtitan/*/benchmark_cpu_llama.json"))
    assert files == ["torchtitan/dp_mbs4-2/benchmark_cpu_llama.json", "torchtitan/dp_mbs4/benchmark_cpu_llama.json"]
    steps = json.loads((folder / files[1]).read_text())["steps"]
    assert [step["loss"] for step in steps] == [11, 10, 9, 8]
    assert all(0.04 < step["step_seconds"] < 0.5 for step in steps)


def test_one_table_has_both_with_n_and_spread_and_how_much_faster_ours_is(in_turn):
    _, done, rows = in_turn
    lines = done.stdout.splitlines()
    ours, theirs, left_out = lines[2:]
    assert ours.startswith("dp_mbs4   megatron")
    assert "2+2" in ours
    assert ours.rstrip().endswith("]")
    assert theirs.startswith("dp_mbs4   torchtitan")
    assert "TP1 PP1 DP2 MBS1 s64 fp32" in theirs
    assert left_out.split(maxsplit=2) == ["tp4_mbs4", "megatron", "left out: not for 2 GPUs"]
    ratio = next(row["times_as_fast_as_torchtitan"] for row in rows if row["program"] == "megatron")
    assert ratio["low"] < ratio["value"] < ratio["high"]
    rates = {row["program"]: row["metrics"][0]["tokens_per_second_per_gpu"]["value"] for row in rows if row["metrics"]}
    assert ratio["value"] == pytest.approx(rates["megatron"] / rates["torchtitan"], rel=0.9)


def test_a_resumed_series_keeps_what_is_there(in_turn, tmp_path):
    folder, done, rows = in_turn
    shutil.copytree(folder, tmp_path / "again")
    again = engine_speed(tmp_path / "again", *IN_TURN, "--rounds", "2", "--resume")
    assert again.stdout == done.stdout
    assert json.loads((tmp_path / "again" / "engine_speed.json").read_text()) == rows


def test_a_resumed_series_makes_again_what_trained_another_batch_on_other_gpus(in_turn, tmp_path):
    folder, _, before = in_turn
    shutil.copytree(folder, tmp_path / "again")
    again = engine_speed(tmp_path / "again", *IN_TURN, "--gpus", "1", "--only", "dp_mbs4", "--resume")
    assert again.returncode == 0, again.stderr
    rows = json.loads((tmp_path / "again" / "engine_speed.json").read_text())
    assert [row["program"] for row in rows] == ["megatron", "torchtitan"]
    for row in rows:
        (run,) = row["runs"]
        assert (run["machine"]["gpus_per_node"], run["global_batch_sequences"]) == (1, 4)
        assert run["run_id"] not in {made["run_id"] for one in before for made in one["runs"]}


@pytest.fixture
def ours(in_turn, tmp_path):
    """The embedded engine's first run alone."""
    shutil.copytree(in_turn[0] / "dp_mbs4", tmp_path / "dp_mbs4")
    return tmp_path


WITH_TORCHTITAN = (*IN_TURN, "--only", "dp_mbs4", "--resume")


def test_what_was_broken_off_is_made_again_and_what_trained_on_something_else_is_not_counted(ours):
    (cut,) = ours.glob("dp_mbs4/runs/*/run.json")
    for file in (cut, ours / "dp_mbs4" / "benchmark_cpu_llama.json"):
        document = json.loads(file.read_text())
        document.get("run", document)["outcome"] = "interrupted"
        file.write_text(json.dumps(document))
    done = engine_speed(ours, *WITH_TORCHTITAN, FAKE_TITAN_BATCH="16")
    assert done.returncode == 0, done.stderr
    rows = json.loads((ours / "engine_speed.json").read_text())
    assert rows[0]["runs"][0]["outcome"] == "completed"
    assert rows[0]["runs"][0]["run_id"] != cut.parent.name
    assert rows[1]["program"] == "torchtitan"
    assert rows[1]["runs"][0]["mismatches"][0] == "global batch: 8 was asked for, 16 ran"
    assert "global batch: 8 was asked for, 16 ran" in done.stdout
    assert rows[0]["times_as_fast_as_torchtitan"] is None


def test_a_torchtitan_that_fails_leaves_ours_as_it_is(ours):
    failure = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    done = engine_speed(ours, *WITH_TORCHTITAN, FAKE_TITAN_FAILS=failure)
    rows = json.loads((ours / "engine_speed.json").read_text())
    assert [row["runs"][0]["outcome"] for row in rows] == ["completed", "out_of_memory"]
    assert done.returncode == 0, done.stderr
    assert "out_of_memory: The GPU ran out of memory" in done.stdout


@pytest.mark.parametrize("here", [1, 2, 4, 8])
def test_equal_work_gives_each_gpu_as_many_sequences_as_one_of_four_would_have(here):
    for layout in LAYOUTS:
        given = layout.with_equal_work(here)
        assert given.global_batch == (layout.global_batch if layout.gpus else layout.global_batch / 4 * here)
        assert given.ranks(here) == layout.ranks(here)


@pytest.mark.parametrize("here", [1, 2, 4, 8])
def test_layouts_degrade_to_the_gpus_that_are_there(here):
    fitting = {layout.name: layout.ranks(here) for layout in LAYOUTS}
    assert fitting["qwen_one_gpu"] == 1
    assert fitting["dp_mbs4"] == here
    assert fitting["tp4_mbs4"] == (here if here >= 4 else None)
    assert Layout(name="x", micro_batch=4, global_batch=12).ranks(2) is None
    assert len(fitting) == len(LAYOUTS)
