"""tprimat scaling as a user starts it."""

import csv
import json
import re
from pathlib import Path

import pytest
from changes import replace
from commands import run_command

from tprimat.records.store import RunDirectory
from tprimat.report.plots.scaling import draw_multiplier, draw_throughput
from tprimat.runner.scaling import fit_series, read_scaling_table

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
TABLE = ROOT / "tests" / "tables" / "throughput_scaling.csv"


def scaling(*arguments):
    return run_command("scaling", *arguments)


def test_the_published_table_comes_out_column_by_column(tmp_path):
    done = scaling("--table", TABLE, "--output", tmp_path, "--format", "md")
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    published = list(csv.reader(TABLE.read_text().splitlines()))[1:]
    assert [line[:6] for line in lines[2:]] == published
    assert [line[6:] for line in lines[2:]] == [
        ["1.00", "100.0 %"],
        ["3.60", "89.9 %"],
        ["6.04", "75.5 %"],
        ["10.99", "68.7 %"],
        ["20.56", "64.3 %"],
    ]
    assert "Weak scaling" in done.stdout
    for picture in ("img_throughput.png", "img_multiplier.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_both_pictures_say_the_finding_and_what_was_measured(tmp_path):
    (scaled,) = fit_series([read_scaling_table(TABLE)])
    for draw in (draw_throughput, draw_multiplier):
        path = tmp_path / f"{draw.__name__}.svg"
        draw([scaled], path)
        words = path.read_text()
        assert "throughput_scaling: 32 GPUs make 20.56 times the throughput of 1, 64.3 % of proportional" in words
        assert "weak scaling · one figure per point" in words


def test_laws_are_printed_with_their_uncertainty_and_a_warning_where_they_do_not_fit(tmp_path):
    out = scaling("--table", TABLE, "--output", tmp_path).stdout
    assert "Amdahl's law: contention 1.75 % [0.10, 3.40]" in out
    assert "USL: contention" in out
    assert "do not extrapolate" in out
    document = json.loads(scaling("--table", TABLE, "--output", tmp_path, "--format", "json").stdout)
    assert document[0]["kind"] == "weak"
    assert document[0]["laws"][0]["contention"]["low"] < document[0]["laws"][0]["contention"]["value"]


def test_runs_of_several_sizes_are_a_series(tmp_path):
    source = RunDirectory(RUNS / "h100" / "runs" / "h100-llama-0")
    for gpus in (2, 4, 8):
        run, place = source.read_run(), RunDirectory(tmp_path / "runs" / f"r{gpus}")
        machine = replace(run.machine, gpus_per_node=gpus)
        batch = 16 * gpus
        place.write_run(
            replace(run, run_id=f"r{gpus}", machine=machine, data_parallel=gpus, global_batch_sequences=batch, evidence=None)
        )
        for step in source.read_steps():
            place.append_step(replace(step, tokens=batch * 2048, step_seconds=step.step_seconds * (1 + gpus / 100)))
    done = scaling(tmp_path, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "llama on H100 SXM, minimal_communication" in done.stdout
    (widest,) = (line for line in done.stdout.splitlines() if line.startswith("8 GPUs across 1 node"))
    assert re.search(r"  ([\d,]+) \[[\d,]+, [\d,]+\]  ", widest), "a measured throughput has its interval"
    assert re.search(r"  3\.\d\d \[3\.\d\d, 3\.\d\d\] +9\d\.\d % \[9\d\.\d, 9\d\.\d\]$", widest), widest
    assert max(map(len, done.stdout.split("Weak scaling")[0].splitlines())) <= 120
    assert re.search(r"Multiplier and efficiency assume that single runs vary by \d\.\d %, as their steps do\.", done.stdout)
    point = json.loads(scaling(tmp_path, "--output", tmp_path, "--format", "json").stdout)[0]["points"][-1]
    assert point["efficiency_low"] < point["efficiency"] < point["efficiency_high"] < point["multiplier_low"]
    assert "Weak scaling" in done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus,total_tokens\n1,100\n2,200\n", "No throughput"),
        ("gpus,tokens_per_second\n1,100\n", "two or more numbers of GPUs"),
        ("gpus,tokens_per_second,total_tokens,elapsed_seconds\n1,100,100,2.0\n2,200,200,1.0\n", "contradict each other"),
        ("gpus,tokens_per_second\n1,fast\n2,200\n", "not a number"),
        ("tokens_per_second\n100\n", "No number of GPUs"),
        ("", "is empty"),
    ],
)
def test_a_bad_table_is_explained(tmp_path, text, words):
    file = tmp_path / "table.csv"
    file.write_text(text)
    done = scaling("--table", file, "--output", tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_runs_of_one_size_are_refused_with_what_to_do(tmp_path):
    done = scaling(RUNS / "h100", "--output", tmp_path)
    assert done.returncode == 2
    assert "No configuration ran on two numbers of GPUs" in done.stderr
    assert "--gpus" in done.stderr
    assert "No configuration ran on two numbers of processes." in scaling(RUNS / "cpu", "--output", tmp_path).stderr
