"""benchmarks/engine_speed.py on a CPU: real runs of the embedded engine, alternating with a fake torchtitan."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_TURN = ("--gpus", "2", "--only", "dp_mbs4,tp4_mbs4", "--steps", "3", "--peer-steps", "4", "--against", "torchtitan")
FAKE = ROOT / "tests" / "fake_packages"
sys.path.insert(0, str(ROOT / "benchmarks"))


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


def test_both_programs_run_in_every_round_which_alternates(in_turn):
    *_, rows = in_turn
    runs = [(run["started_at"], row["program"]) for row in rows for run in row["runs"]]
    assert [program for _, program in sorted(runs)] == ["megatron", "torchtitan", "torchtitan", "megatron"]


def test_the_log_of_torchtitan_becomes_a_record_that_proves_the_workload(in_turn):
    folder, _, rows = in_turn
    (row,) = [row for row in rows if row["program"] == "torchtitan"]
    assert len(row["metrics"]) == 2
    for run in row["runs"]:
        assert (run["engine"], run["outcome"], run["mismatches"], run["clock"]) == ("torchtitan", "completed", [], "framework")
        source, proof = run["evidence"]["source"], run["evidence"]["workload"]
        assert (proof["data_parallel"], proof["micro_batch_sequences"], proof["global_batch_sequences"]) == (2, 1, 8)
        assert (proof["matmul_dtype"], source) == ("fp32", "log")
    files = sorted(path.relative_to(folder).as_posix() for path in folder.glob("torchtitan/*/benchmark_cpu_llama.json"))
    assert files == ["torchtitan/dp_mbs4-2/benchmark_cpu_llama.json", "torchtitan/dp_mbs4/benchmark_cpu_llama.json"]
    steps = json.loads((folder / files[1]).read_text())["steps"]
    assert [step["loss"] for step in steps] == [11, 10, 9, 8]
    assert all(0.04 < step["step_seconds"] < 0.5 for step in steps)


def test_one_table_has_both_with_n_and_spread_and_how_much_faster_ours_is(in_turn):
    _, done, rows = in_turn
    lines = done.stdout.splitlines()
    assert lines[0].endswith("megatron / peer")
    ours, theirs, left_out, _, clocks = lines[2:]
    assert ours.startswith("dp_mbs4   megatron")
    assert "2+2" in ours
    assert theirs.startswith("dp_mbs4   torchtitan")
    assert "TP1 PP1 DP2 MBS1 s64 fp32" in theirs
    assert "1.5 GiB reserved" in theirs
    assert re.search(r"x(\]| \(n = 4\))$", theirs)  # an interval, or that there are too few runs for a useful one
    assert left_out.split(maxsplit=2) == ["tp4_mbs4", "megatron", "left out: not for 2 GPUs"]
    assert clocks.startswith("torchtitan times itself")
    ratio = next(row["engine_times_as_fast"] for row in rows if row["program"] == "torchtitan")
    assert ratio["low"] < ratio["value"] < ratio["high"]
    rates = {row["program"]: row["metrics"][0]["tokens_per_second_per_gpu"]["value"] for row in rows if row["metrics"]}
    assert ratio["value"] == pytest.approx(rates["megatron"] / rates["torchtitan"], rel=0.9)
    assert next(row["differs_in"] for row in rows if row["program"] == "torchtitan").count("clock") == 1


def test_a_resumed_series_keeps_what_is_there_and_stops_before_a_run_that_would_end_after_its_time_limit(in_turn, tmp_path):
    folder, done, rows = in_turn
    shutil.copytree(folder, tmp_path / "again")
    resumed = (tmp_path / "again", *IN_TURN, "--rounds", "2", "--resume", "--time-limit")
    again = engine_speed(*resumed, "0.001")
    assert (again.stdout, "llama" in again.stderr) == (done.stdout, False)
    assert json.loads((tmp_path / "again" / "engine_speed.json").read_text()) == rows
    shutil.rmtree(tmp_path / "again" / "dp_mbs4-2")
    stopped = engine_speed(*resumed, "10")
    assert stopped.returncode == 0, stopped.stderr
    last = stopped.stdout.splitlines()[-1]
    assert last.startswith("stopped after 3 of 4 runs: call again with --resume (the next run may take ")
    rows = json.loads((tmp_path / "again" / "engine_speed.json").read_text())
    assert [(row["program"], len(row["runs"])) for row in rows] == [("megatron", 1), ("torchtitan", 2), ("megatron", 0)]
    assert not (tmp_path / "again" / "dp_mbs4-2").exists()


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
    assert rows[1]["engine_times_as_fast"] is None


def test_a_program_that_runs_out_of_memory_does_not_run_in_later_rounds(tmp_path):
    failure = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    words = ("--engine", "torchtitan", "--gpus", "2", "--only", "dp_mbs4", "--steps", "3", "--rounds", "3", "--against", "none")
    done = engine_speed(tmp_path, *words, FAKE_TITAN_FAILS=failure)
    (row,) = json.loads((tmp_path / "engine_speed.json").read_text())
    assert [run["outcome"] for run in row["runs"]] == ["out_of_memory"]
    assert "out of memory: The GPU ran out of memory" in done.stdout
    again = engine_speed(tmp_path, *words, "--resume")
    assert json.loads((tmp_path / "engine_speed.json").read_text())[0]["runs"] == row["runs"], again.stderr
