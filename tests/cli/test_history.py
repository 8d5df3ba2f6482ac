"""tprimat history: an index that only saves time, changes of rate with what changed, and the gate against the last good runs."""

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from commands import ROOT, run_command

from tprimat.records import index
from tprimat.records.index import INDEX_FILE
from tprimat.runner import history as engine


@pytest.fixture
def make(tmp_path):
    """Write a run folder with a given rate."""
    source = next(iter(sorted((ROOT / "tests" / "runs").glob("**/run.json"))), None)
    if source is not None:
        record = json.loads(source.read_text())
    else:
        path = next(iter(sorted((ROOT / "tests" / "runs").glob("**/benchmark_*.json"))))
        record = json.loads(path.read_text())["run"]
    record.update(outcome="completed", mismatches=[], cause=None, profiled_steps=[])

    def write(number, rate, folder="results", **fields):
        run = {**record, "run_id": f"r{number:03d}", "started_at": f"2026-01-{number + 1:02d}T00:00:00.000+00:00", **fields}
        path = tmp_path / folder / "runs" / run["run_id"]
        path.mkdir(parents=True, exist_ok=True)
        (path / "run.json").write_text(json.dumps(run))
        tokens = run["global_batch_sequences"] * run["sequence_tokens"]
        seconds = tokens / rate / run["machine"]["gpus_per_node"]
        steps = [{"step": step, "step_seconds": (1 + step % 3 / 1000) * seconds, "tokens": tokens} for step in range(1, 31)]
        (path / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        return path

    return write


def history(folder, *flags):
    return run_command("history", *flags, cwd=folder)


def test_a_change_is_shown_with_what_changed_and_drawn_on_a_page(make, tmp_path):
    for number in range(12):
        make(number, 1000 + number % 2 if number < 7 else 900, software={"torch": "2.12" if number < 7 else "2.13"})
    make(12, 10, outcome="failed", cause="a cable")
    done = history(tmp_path, "results", "--output", "history.html")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"-10\.\d % since 2026-01-08 00:00 \(run r007; medians of 7 runs before and 5 since\)\n    torch: 2\.12 -> 2\.13",
        done.stdout,
    ), done.stdout
    assert "12 runs, 2026-01-01 to 2026-01-12" in done.stdout
    page = (tmp_path / "history.html").read_text()
    assert page.count("<circle") == 12
    assert page.count("<line class=change") == 1
    assert not re.search(r"(src|href)=|https?://", page), "it opens offline"


def test_a_variable_is_what_changed_and_begins_no_other_history(make, tmp_path):
    """Records from before variables were recorded have None."""
    for number in range(12):
        variables = None if number < 3 else {} if number < 7 else {"NCCL_P2P_DISABLE": "1"}
        make(number, 1000 + number % 2 if number < 7 else 900, environment=variables)
    done = history(tmp_path, "results")
    assert "12 runs" in done.stdout, done.stdout + done.stderr
    assert re.search(r"-10\.\d % since 2026-01-08 00:00.*\n    NCCL_P2P_DISABLE: .* -> 1", done.stdout), done.stdout


def test_rates_of_a_cpu_are_per_process_and_a_record_without_a_date_says_so(make, tmp_path):
    make(0, 1000, started_at=None)
    done = history(tmp_path, "results", "--output", "history.html")
    assert "2 processes" in done.stdout
    assert "1 run, no date; the newest 999 tokens/s/process" in done.stdout
    assert "tokens/s/GPU" not in (tmp_path / "history.html").read_text()


def test_configurations_with_few_runs_are_a_table(make, tmp_path):
    for number in range(6):
        make(number, 1000)
    for number, rate in ((6, 800), (7, 820)):
        make(number, rate, strategy="balanced")
    assert history(tmp_path, "results", "--output", "history.html").returncode == 0
    page = (tmp_path / "history.html").read_text()
    assert (page.count("<svg"), page.count("<circle"), page.count("<tr>")) == (1, 6, 2)
    assert "<td>2026-01-08<td>2<td>819<td>799 to 819" in page


def test_result_files_without_their_folders_are_runs_too_and_copies_count_once(make, tmp_path):
    path = make(0, 1000)
    run, steps = json.loads((path / "run.json").read_text()), (path / "steps.jsonl").read_text().splitlines()
    document = {"schema_version": 1, "run": run, "steps": [json.loads(line) for line in steps]}
    for number in (0, 1):  # a copy of the folder's run, and one that came alone
        run["run_id"] = f"r{number:03d}"
        (tmp_path / "results" / f"benchmark_cuda_{number}.json").write_text(json.dumps(document))
    done = history(tmp_path, "results")
    assert done.returncode == 0, done.stderr
    assert "2 runs" in done.stdout


def test_a_run_is_read_once_until_it_changes(make, tmp_path, monkeypatch):
    paths = [make(number, 1000) for number in range(5)]
    read = []
    derive = engine.derive
    monkeypatch.setattr(engine, "derive", lambda path: read.append(path.name) or derive(path))
    first = history(tmp_path, "results")
    assert len(read) == 5
    assert history(tmp_path, "results").stdout == first.stdout
    assert len(read) == 5
    make(2, 500)
    (paths[4] / "run.json").unlink()
    assert "4 runs" in history(tmp_path, "results").stdout
    assert read[5:] == ["r002"]
    monkeypatch.setattr(index, "own_version", lambda: "another")
    history(tmp_path, "results")
    assert len(read) == 10, "another version derives other numbers"
    (tmp_path / "results" / INDEX_FILE).write_bytes(b"no database" * 1000)
    assert "4 runs" in history(tmp_path, "results").stdout


def test_a_damaged_record_is_named_and_the_others_count(make, tmp_path):
    make(0, 1000)
    (make(1, 1000) / "run.json").write_text("{")
    gone = make(2, 1000)
    shutil.rmtree(gone)
    gone.mkdir()
    (gone / "run.json").symlink_to("nowhere")
    done = history(tmp_path, "results")
    assert done.returncode == 1
    assert done.stderr.count("skipped: ") == 2
    assert "1 run," in done.stdout


def test_an_index_goes_on_where_its_folder_moved_and_forgets_what_was_mended(make, tmp_path):
    make(0, 1000)
    telemetry = make(1, 1000) / "telemetry.jsonl"
    telemetry.write_text("{\n")
    assert "skipped: results/runs/r001/" in history(tmp_path, "results").stderr
    (tmp_path / "results").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    done = history(tmp_path / "elsewhere", "../moved", "--against", "../moved")
    assert "skipped: ../moved/runs/r001/" in done.stderr, done.stderr
    assert "tokens/s/process" in done.stdout
    (tmp_path / "moved" / "runs" / "r001" / "telemetry.jsonl").unlink()
    done = history(tmp_path, "moved")
    assert done.returncode == 0, done.stderr
    assert "2 runs" in done.stdout


def test_a_pipe_is_written_to_and_stays(make, tmp_path):
    make(0, 1000)
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", "pipe"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as reader:
        done = history(tmp_path, "results", "--output", "pipe")
        page, _ = reader.communicate(timeout=20)
    assert done.returncode == 0, done.stderr
    assert "</html>" in page
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(("rate", "status"), [(1000, 0), (850, 1)])
def test_the_gate_compares_with_the_last_good_runs(make, tmp_path, rate, status):
    for number in range(10):
        make(number, 2000 if number < 4 else 1000 + number)  # faster long ago: only the last five count
    make(10, 3, outcome="failed")
    for number in (20, 21, 22):
        make(number, rate + number / 10, folder="new")
    done = history(tmp_path, "results", "--against", "new", "--fail-if-slower", "5%")
    assert done.returncode == status, done.stdout + done.stderr
    assert "the last 5" in done.stdout


def test_new_runs_of_a_configuration_without_a_past_keep_the_gate_closed(make, tmp_path):
    make(0, 1000)
    make(1, 1000, folder="new", strategy="another")
    done = history(tmp_path, "results", "--against", "new", "--fail-if-slower", "5%")
    assert done.returncode == 1
    assert "nothing to compare" in done.stderr


def test_mistakes_are_explained(tmp_path):
    assert "--fail-if-slower needs new runs" in history(tmp_path, "--fail-if-slower", "3%").stderr
    missing = history(tmp_path, "nowhere")
    assert (missing.returncode, "There is no folder nowhere" in missing.stderr) == (2, True)


def test_a_folder_whose_name_is_not_text_hides_no_other_run(make, tmp_path):
    make(0, 1000)
    make(1, 1000).rename(tmp_path / "results" / "runs" / os.fsdecode(b"\xff"))
    done = history(tmp_path, "results")
    assert "1 run" in done.stdout, done.stdout + done.stderr
    assert "\\xff is not UTF-8 text; rename it." in done.stdout + done.stderr


@pytest.mark.parametrize("harm", ["damaged", "locked"])
def test_an_index_that_fails_later_than_its_opening_costs_time_only(make, tmp_path, harm, monkeypatch):
    for number in range(40):
        make(number, 1000, started_at=f"2026-01-01T00:{number:02d}:00.000+00:00")
    assert "40 runs" in history(tmp_path, "results").stdout
    path = tmp_path / "results" / INDEX_FILE
    if harm == "damaged":
        content = path.read_bytes()
        path.write_bytes(content[:12_288] + b"\xff" * (len(content) - 12_288))
    make(40, 1000, started_at="2026-01-01T00:40:00.000+00:00")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda place: connect(place, timeout=0.1))
    with contextlib.closing(connect(path if harm == "locked" else ":memory:")) as other:
        other.execute("BEGIN IMMEDIATE")
        done = history(tmp_path, "results")
    assert done.returncode == 0, done.stderr
    assert "41 runs" in done.stdout


def test_a_cut_model_is_named_by_its_shape(make, tmp_path):
    shape = {**json.loads(Path(make(0, 1000), "run.json").read_text())["shape"], "name": "llama-3.1-8b-20-layers", "layers": 20}
    make(1, 1100, size="full", model="llama", shape=shape)
    done = history(tmp_path, "results")
    assert re.search(r"^llama \(llama-3\.1-8b-20-layers\) · ", done.stdout, re.MULTILINE), done.stdout
