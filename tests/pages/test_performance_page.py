"""benchmarks/results/performance.md: its tool includes later records."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tprimat.analyze.trace import summarise
from tprimat.records.store import as_document

ROOT = Path(__file__).parents[2]
PAGE, EARLIER = (ROOT / "benchmarks" / "results" / name for name in ("performance.md", "performance-earlier.md"))
RESULTS = ROOT / "benchmarks" / "records" / "h200"


def tool(*words):
    command = [sys.executable, "tools/performance_page.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def block(page, name):
    return re.search(rf"<!-- figures {name} -->\n(.*?)<!-- end -->", page.read_text(), re.DOTALL)[1].strip()


def row(page, name, start):
    (line,) = [line for line in block(page, name).splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_figure_that_no_record_holds_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(re.sub(r"\d\d\.\d %", "00.0 %", PAGE.read_text(), count=1))
    assert tool("--check", "--page", page).returncode == 1
    assert tool("--page", page).returncode == 0
    assert page.read_text() == PAGE.read_text()


def test_each_figure_has_a_place():
    found = [re.findall(r"<!-- figures (\w+) -->", page.read_text()) for page in (PAGE, EARLIER)]
    assert found == [
        [
            "answer",
            "leads",
            "choices_of_steps",
            "output_layer",
            "losses",
            "answer_h100",
            "leads_h100",
            "choices_of_steps_h100",
            "energy",
            "profiles",
            "switches",
            "unswitched",
            "cuda_graphs",
            "graph_losses",
            "exchanges",
            "exchanges_as_graphs",
            "copy_streams",
            "forward_sums",
            "start_up",
            "callback",
            "no_gain",
            "queues",
        ],
        ["earlier_leads", "earlier_leads_h100", "layouts", "layouts_on_two", "power", "first_steps", "limits"],
    ]


def test_torchtitan_profiles_and_first_steps_appear_once_they_are_recorded(tmp_path):
    results, page = tmp_path / "h200", tmp_path / "page.md"
    (results / "profiles").mkdir(parents=True)
    for name in ("probes-1gpu", "probes-4gpu", "switches"):
        (results / name).symlink_to(RESULTS / name)
    recorded = json.loads((RESULTS / "engine" / "dp_mbs4" / "benchmark_cuda_llama.json").read_text())
    for derived in ("gpu_info", "raw_step_times"):
        del recorded[derived]
    for program, factor, gibibytes in (("engine", 1, 80), ("torchtitan", 1.25, 50)):
        document = json.loads(json.dumps(recorded))
        document["run"] |= {"run_id": program, "engine": "megatron" if program == "engine" else program}
        ended = 41.5 - document["steps"][0]["step_seconds"] * factor
        for step in document["steps"]:
            step["step_seconds"] *= factor
            ended += step["step_seconds"]
            step["ended_at_seconds"] = ended
            step["peak_reserved_bytes"] = gibibytes * 2**30
        folder = results / program / "dp_mbs4"
        folder.mkdir(parents=True)
        (folder / "benchmark_cuda_llama.json").write_text(json.dumps(document))
    kernel = {"ph": "X", "cat": "kernel", "name": "nvjet_tst", "ts": 0, "dur": 30000, "pid": 0, "tid": 7}
    summary = summarise({"traceEvents": [kernel]})
    (results / "profiles" / "dp4.json").write_text(json.dumps(as_document(summary)))
    page.write_text(EARLIER.read_text() + PAGE.read_text())
    done = tool("--page", page, "--results", results)
    assert done.returncode == 0, done.stderr
    cells = row(page, "layouts", "`dp_mbs4`")
    assert (cells[1], cells[9]) == ("12,353", "1.250"), "one run per side has no interval"
    assert cells[10] == "80.0 GiB / 50.0 GiB"
    assert row(page, "first_steps", "`dp_mbs4`")[1] == "41.5 s"
    assert row(page, "profiles", "matmul")[1] == "100.0 % (30.0 ms)"


def test_start_up_stages_come_from_their_records(tmp_path):
    results, page = tmp_path / "h200", tmp_path / "page.md"
    shutil.copytree(RESULTS, results)
    file = results / "start-up" / "warm" / "benchmark_cuda_llama.json"
    document = json.loads(file.read_text())
    document["run"]["start_up"] |= {"imported": 9.87}
    file.write_text(json.dumps(document))
    shutil.rmtree(results / "exchange" / "forward-sums-through-nccl")
    shutil.copy(PAGE, page)
    done = tool("--page", page, "--results", results)
    assert done.returncode == 0, done.stderr
    assert row(page, "start_up", "warm")[2] == "9.87 s"
    assert "through NCCL" not in block(page, "forward_sums")
