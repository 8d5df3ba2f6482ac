"""benchmarks/results/performance.md: its tool includes later records."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "performance.md"
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
