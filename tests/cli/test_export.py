"""tprimat export: one row per run, in files that spreadsheets and notebooks read."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command

from tprimat.report.export import COLUMNS

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
NAMES = list(COLUMNS)


def export(to, path, *folders):
    return run_command("export", "--to", to, path, "--results-dir", *(folders or [RUNS / "h100"]))


def rows_of(path):
    with path.open(newline="", encoding="utf8") as file:
        return {row["run_id"]: row for row in csv.DictReader(file)}


def test_csv_has_a_row_for_each_run_with_what_ran_and_how_fast(tmp_path):
    done = export("csv", tmp_path / "runs.csv")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/runs.csv: 6 runs\n")
    rows = rows_of(tmp_path / "runs.csv")
    assert list(rows["h100-llama-0"])[: len(NAMES)] == NAMES
    row = rows["h100-llama-0"]
    what_ran = ("model", "strategy", "tensor_parallel", "data_parallel", "gpus", "nodes", "matmul_dtype")
    assert [row[name] for name in what_ran] == ["llama", "minimal_communication", "1", "8", "8", "1", "bf16"]
    assert (row["outcome"], row["counted"], row["n"], row["parameters"]) == ("completed", "True", "37", "8030261248")
    low, value, high = (float(row[f"tokens_per_second_per_gpu{end}"]) for end in ("_low", "", "_high"))
    assert low < value < high
    assert value == pytest.approx(7393.10, abs=0.01)
    assert row["joules_per_token"] == ""


def test_a_run_that_failed_has_a_row_with_its_outcome_and_no_figures(tmp_path):
    export("csv", tmp_path / "runs.csv")
    row = rows_of(tmp_path / "runs.csv")["h100-qwen-oom"]
    assert (row["outcome"], row["counted"], row["n"], row["tokens_per_second"]) == ("out_of_memory", "False", "", "")
    assert row["not_counted_because"].startswith("out of memory: ")


def test_text_that_a_spreadsheet_would_run_is_escaped_and_numbers_are_not(tmp_path):
    folder = tmp_path / "results" / "runs" / "cpu-llama-0"
    shutil.copytree(RUNS / "cpu" / "runs" / "cpu-llama-0", folder)
    record = json.loads((folder / "run.json").read_text())
    dangerous = {"model": "=1+1", "strategy": "@SUM(A1)", "engine": "+1", "seed": -7}
    (folder / "run.json").write_text(json.dumps(record | dangerous))
    export("csv", tmp_path / "runs.csv", tmp_path / "results")
    (row,) = rows_of(tmp_path / "runs.csv").values()
    assert [row[name] for name in dangerous] == ["'=1+1", "'@SUM(A1)", "'+1", "-7"]


def test_a_missing_library_is_one_line_that_says_what_to_install(tmp_path):
    # A process of its own, in which the library cannot be imported, whether it is installed or not.
    hidden = "import sys; sys.modules['wandb'] = None; from tprimat.cli.main import start; "
    words = ["--to", "wandb-offline", str(tmp_path / "x"), "--results-dir", str(RUNS)]
    call = f"sys.exit(start('export', 'tprimat export', {words!r}))"
    done = subprocess.run([sys.executable, "-c", hidden + call], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --to wandb-offline needs wandb, which is not installed: pip install wandb\n"


def test_the_documentation_explains_every_column():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf8").split("### Columns")[1]
    table = [line for line in text.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in table if "*" not in line] == NAMES
