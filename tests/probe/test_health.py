"""tprimat doctor --nodes: each GPU against its neighbours, measured by real ranks, judged from what they print."""

import json
import subprocess
import sys

import pytest
from commands import ROOT, fake_nvml

from tprimat.hardware.gpus import visible_gpus
from tprimat.hardware.health import check_errors
from tprimat.runner.health import MARK as READ
from tprimat.runner.health import judged

RANK = {
    "product_flops": 700e12,
    "copy_bytes_per_second": 4e12,
    "node_reduce_bytes_per_second": 300e9,
    "all_reduce_bytes_per_second": 40e9,
}


def ranks(**slow):
    """Eight ranks on two nodes; `r5=(field, factor)` makes one slower."""
    found = [{**RANK, "rank": rank, "host": f"gpu{rank // 4}", "gpu": rank % 4} for rank in range(8)]
    for name, (field, factor) in slow.items():
        found[int(name[1:])][field] *= factor
    return found


def test_a_gpu_slower_than_its_neighbours_is_named_with_its_node():
    checks = {check.name: check for check in judged(ranks(r5=("product_flops", 0.93)), on_cpu=False)}
    assert checks["matrix product"].status == "problem"
    assert checks["matrix product"].finding.startswith("GPU 1 on gpu1 is 7% slower; 700.0 TFLOP/s in the middle, 651.0 TFLOP/s")
    assert [check.status for check in checks.values()].count("problem") == 1
    assert "over 8 ranks on 2 nodes" in checks["all-reduce"].finding


@pytest.mark.parametrize(("factor", "on_cpu"), [(0.96, False), (0.1, True)])
def test_what_is_within_five_percent_or_on_a_cpu_is_no_problem(factor, on_cpu):
    found = ranks(r5=("product_flops", factor))
    assert {check.status for check in judged(found, on_cpu=on_cpu)} == {"ok"}


def test_one_rank_alone_has_no_all_reduce():
    (alone,) = [
        {**RANK, "rank": 0, "host": "a", "gpu": 0, "node_reduce_bytes_per_second": None, "all_reduce_bytes_per_second": None}
    ]
    assert [check.name for check in judged([alone], on_cpu=False)] == ["matrix product", "memory"]


def test_memory_errors_and_narrow_links_are_named(monkeypatch):
    with fake_nvml():
        monkeypatch.setenv(
            "FAKE_GPUS", json.dumps([{}, {"uncorrected_errors": 3}, {"pcie_width": 8}, {"uncorrected_errors": None}])
        )
        check = check_errors(visible_gpus({}))
        assert check.status == "problem"
        assert check.finding == "GPU 1: 3 uncorrected memory errors since the driver was loaded; GPU 2: PCIe x8 of x16"
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{}, {}]))
        assert check_errors(visible_gpus({})).status == "ok"


def test_real_ranks_are_measured_and_judged():
    from tprimat.probe.health import MARK

    assert MARK == READ
    command = [sys.executable, "-m", "tprimat", "doctor", "--nodes", "1", "--gpus", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["well"]
    assert [check["name"] for check in document["checks"]] == ["matrix product", "memory", "node all-reduce", "all-reduce"]
    assert "over 2 ranks on 1 nodes" in document["checks"][-1]["finding"]
