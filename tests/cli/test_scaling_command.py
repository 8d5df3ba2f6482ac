"""tprimat scaling as a user starts it."""

import json
import re
from pathlib import Path

from changes import replace
from commands import run_command

from tprimat.analyze.scaling import Point, Series
from tprimat.records.schema import Estimate
from tprimat.records.store import RunDirectory
from tprimat.report.plots import draw_sheet
from tprimat.report.plots.scaling import MULTIPLIER, THROUGHPUT, scaling_sheet

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"


def scaling(*arguments):
    return run_command("scaling", *arguments)


def test_both_pictures_say_the_finding_and_what_was_measured(tmp_path):
    rates = {1: 34_086.0, 4: 122_599.0, 8: 205_908.0, 16: 374_571.0, 32: 700_972.0}
    points = [
        Point(gpus=gpus, nodes=None, tokens_per_second=Estimate(value=rate, low=None, high=None, samples=1), tokens=33.8e6 * gpus)
        for gpus, rate in rates.items()
    ]
    scaled = Series(name="throughput_scaling", kind="weak", points=tuple(points))
    for curves in (THROUGHPUT, MULTIPLIER):
        draw_sheet(scaling_sheet([scaled], curves), tmp_path / "picture.svg")
        words = (tmp_path / "picture.svg").read_text()
        assert "throughput_scaling: 32 GPUs make 20.56 times the throughput of 1, 64.3 % of proportional" in words
        assert "weak scaling · bars: 95 % intervals" in words


def test_runs_of_several_sizes_are_a_series(tmp_path):
    source = RunDirectory(RUNS / "h100" / "runs" / "h100-llama-0")
    for gpus in (2, 4, 8):
        run, place = source.read_run(), RunDirectory(tmp_path / "runs" / f"r{gpus}")
        machine, batch = replace(run.machine, gpus_per_node=gpus), 16 * gpus
        place.write_run(
            replace(run, run_id=f"r{gpus}", machine=machine, data_parallel=gpus, global_batch_sequences=batch, evidence=None)
        )
        for step in source.read_steps():
            place.append_step(
                replace(step, tokens=batch * 2048, step_seconds=step.step_seconds * (1 + gpus / 100), ended_at_seconds=None)
            )
    done = scaling(tmp_path, "--output", tmp_path)
    assert done.stdout.startswith("llama on H100 SXM, minimal_communication\n"), done.stderr
    (widest,) = (line for line in done.stdout.splitlines() if line.startswith("8 GPUs across 1 node"))
    assert re.search(r"  ([\d,]+) \[[\d,]+, [\d,]+\]  ", widest), "a measured throughput has its interval"
    assert re.search(r"  3\.\d\d \[3\.\d\d, 3\.\d\d\] +9\d\.\d % \[9\d\.\d, 9\d\.\d\]$", widest), widest
    assert max(map(len, done.stdout.split("Weak scaling")[0].splitlines())) <= 120
    assert re.search(r"Multiplier and efficiency assume that single runs vary by \d\.\d %\.", done.stdout)
    point = json.loads(scaling(tmp_path, "--output", tmp_path, "--format", "json").stdout)[0]["points"][-1]
    assert point["efficiency_low"] < point["efficiency"] < point["efficiency_high"] < point["multiplier_low"]
    few = scaling(tmp_path / "runs" / "r2", tmp_path / "runs" / "r8", "--output", tmp_path).stdout
    assert ["GPUs, from two points alone." in one for one in (done.stdout, few)] == [False, True]


def test_runs_of_one_size_are_refused_with_what_to_do(tmp_path):
    done = scaling(RUNS / "h100", "--output", tmp_path)
    assert done.returncode == 2
    assert "No configuration ran on two GPU counts" in done.stderr
    assert "--gpus" in done.stderr
    assert (
        "No configuration ran on two process counts with the same work per process"
        in scaling(RUNS / "cpu", "--output", tmp_path).stderr
    )
