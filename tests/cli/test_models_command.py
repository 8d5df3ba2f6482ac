"""python3 -m tprimat models, as a user runs it."""

import json
import re

from commands import run_command


def run(*arguments):
    return run_command("models", *arguments)


def test_the_tables_of_two_models():
    done = run("llama-3.1-8b", "mixtral-8x7b")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"llama-3.1-8b +8,030,261,248 +8,030,261,248 +2,048 +46\.64 +48\.25 +48\.18", done.stdout)
    assert "qwen" not in done.stdout


def test_rows_come_as_numbers_in_si_units():
    rows = json.loads(run("llama-3-70b", "--json").stdout)
    assert rows["counts"][0]["total"] == 70_553_706_496


def test_published_runs_have_names_and_one_basis():
    printed = run("llama-3.1-8b", "--published").stdout
    assert re.search(r"^dgx-cloud-llama-3.1-8b-bf16 +8 +527\.8 ", printed, re.MULTILINE)
    assert "llama-3-70b" not in printed
    rows = json.loads(run("--published", "--json").stdout)
    assert len({row["name"] for row in rows}) == len(rows) > 100
    assert {row["convention"] for row in rows} == {"causal"}


def test_without_a_name_all_models_and_accelerators_are_listed():
    printed = run().stdout
    assert len(printed.splitlines()) < 130
    for name in ("deepseek-v3", "gpt-13b", "H100 SXM", "MI355X"):
        assert re.search(f"^{name} ", printed, re.MULTILINE)
