"""tprimat doctor --nodes: each GPU against its neighbours, measured by real ranks, judged from what they print."""

import json
import subprocess
import sys

from commands import ROOT, fake_nvml

from tprimat.engines.base import Command
from tprimat.hardware import health
from tprimat.hardware.gpus import visible_gpus
from tprimat.hardware.health import check_errors
from tprimat.launch.command import run_command
from tprimat.probe.health import node_errors
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
    assert checks["matrix product"].finding.startswith("GPU 1 on gpu1 is 7 % slower; 700.0 TFLOP/s in the middle, 651.0 TFLOP/s")
    assert [check.status for check in checks.values()].count("problem") == 1
    assert "over 8 ranks on 2 nodes" in checks["all-reduce"].finding


def test_what_is_within_five_percent_or_on_a_cpu_is_no_problem_and_one_rank_has_no_all_reduce():
    for factor, on_cpu in ((0.96, False), (0.1, True)):
        found = ranks(r5=("product_flops", factor))
        assert {check.status for check in judged(found, on_cpu=on_cpu)} == {"ok"}
    absent = {"node_reduce_bytes_per_second": None, "all_reduce_bytes_per_second": None}
    alone = {**RANK, **absent, "rank": 0, "host": "a", "gpu": 0}
    assert [check.name for check in judged([alone], on_cpu=False)] == ["matrix product", "memory"]


def test_memory_errors_and_narrow_links_are_named(monkeypatch):
    with fake_nvml():
        monkeypatch.setenv(
            "FAKE_GPUS", json.dumps([{}, {"uncorrected_errors": 3}, {"pcie_width": 8}, {"uncorrected_errors": None}])
        )
        check = check_errors(visible_gpus({}))
        assert check.status == "problem"
        assert check.finding == "GPU 1: 3 uncorrected memory errors since the driver was loaded; GPU 2: PCIe x8 of x16"
        for gpus, finding in (
            ([{}, {}], "no uncorrected memory errors, full PCIe width"),
            (
                [{}, {"uncorrected_errors": None}],
                "no uncorrected memory errors on 1 of 2 GPUs, full PCIe width (the rest is not reported)",
            ),
            ([{"uncorrected_errors": None}], "full PCIe width (the rest is not reported)"),
        ):
            monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus))
            assert (check_errors(visible_gpus({})).status, check_errors(visible_gpus({})).finding) == ("ok", finding)


def amd_smi(folder, errors, widths):
    """A program amd-smi for GPUs with so many uncorrected errors and PCIe lanes."""
    static = [{"gpu": index, "asic": {"market_name": "MI300X"}, "bus": {"max_pcie_width": 16}} for index in range(len(errors))]
    metric = [
        {"gpu": index, "ecc": {"total_correctable_count": 7, "total_uncorrectable_count": count}, "pcie": {"width": width}}
        for index, (count, width) in enumerate(zip(errors, widths, strict=True))
    ]
    answers = [f"{word}) echo '{json.dumps({'gpu_data': cards})}';;" for word, cards in (("static", static), ("metric", metric))]
    (folder / "amd-smi").write_text(f"#!/bin/sh\ncase $1 in {' '.join(answers)} esac\n")
    (folder / "amd-smi").chmod(0o755)


def test_memory_errors_and_narrow_links_of_amd_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with fake_nvml():
        monkeypatch.setenv("FAKE_GPUS", "[]")
        amd_smi(tmp_path, [0, 3, "N/A", 0], [16, 16, "N/A", 8])
        check = check_errors(visible_gpus({}))
        assert check.status == "problem"
        assert check.finding == "GPU 1: 3 uncorrected memory errors since the driver was loaded; GPU 3: PCIe x8 of x16"
        assert check.fix.startswith("amd-smi")
        some = check_errors(visible_gpus({"ROCR_VISIBLE_DEVICES": "0,2"}))
        finding = "no uncorrected memory errors on 1 of 2 GPUs, full PCIe width on 1 of 2 GPUs (the rest is not reported)"
        assert (some.status, some.finding) == ("ok", finding)
        assert check_errors(visible_gpus({"ROCR_VISIBLE_DEVICES": "2"})).status == "absent", "nothing was counted"
        gpus = visible_gpus({})
        (tmp_path / "amd-smi").unlink()
        assert check_errors(gpus).status == "absent"


def test_faulty_rows_of_memory_are_named(monkeypatch):
    with fake_nvml():
        rows = [[0, 0, False, False], [0, 2, True, False], [0, 9, True, True], None]
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{"remapped_rows": one} for one in rows]))
        assert check_errors(visible_gpus({})).finding == (
            "GPU 1: a faulty row of its memory is replaced at the next reset; "
            "GPU 2: a faulty row of its memory could not be replaced"
        )


KERNEL_LOG = """\
6,1201,9112233,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15
4,1733,8801123456,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
4,1734,8801123999,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS
4,1735,8801124999,-;NVRM: Xid (PCI:0000:1B:00): 48, pid=4711, name=python, DBE (double bit error) ECC Error in FBPA
4,1736,8801125999,-;NVRM: Xid (PCI:0000:1b:00): 48, pid=4711, name=python, DBE (double bit error) ECC Error in FBPA
4,1737,8801126999,-;NVRM: Xid (PCI:0000:1b:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 03
"""
"""In the form of /dev/kmsg, with the messages of NVIDIA's driver."""


def test_errors_that_the_driver_reported_to_the_kernel_are_named_with_the_gpu(monkeypatch, tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(KERNEL_LOG)
    monkeypatch.setattr(health, "KERNEL_LOG", log)
    with fake_nvml():
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{"pci": [0, 0x1A, 0]}, {"pci": [0, 0x1B, 0]}]))
        check = health.check_xids(visible_gpus({}))
        assert check.status == "problem"
        assert check.finding == (
            "the GPU at PCI 0000:3b:00: XID 79 (fell off the bus); "
            "GPU 1: XID 48 (memory error that could not be corrected), 2 times; "
            "GPU 1: XID 149 (NETIR_LINK_EVT  Fatal   XC0 i0 Link 03)"
        )
        log.write_text("".join(line for line in KERNEL_LOG.splitlines(keepends=True) if ": 31," in line))
        check = health.check_xids(visible_gpus({}))
        assert (check.status, check.finding) == ("ok", "GPU 1: XID 31 (a program's access to memory that is not its own)")
        log.write_text("6,1,1,-;Linux version 6.8\n")
        assert health.check_xids(visible_gpus({})).finding == "none in the kernel's log"
        log.unlink()
        assert health.check_xids(visible_gpus({})).status == "absent"


def test_what_a_driver_reports_is_named_with_the_node(monkeypatch, tmp_path):
    monkeypatch.setattr(health, "KERNEL_LOG", tmp_path / "kmsg")
    with fake_nvml():
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{}, {"uncorrected_errors": 3}]))
        found = ranks()
        found[0]["errors"] = node_errors()
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{}]))
        found[4]["errors"] = node_errors()
    assert [one.get("errors") for one in found[3:5]] == [None, ()]
    check = list(judged(found, on_cpu=False))[-1]
    assert (check.name, check.status) == ("GPU errors", "problem")
    assert check.finding == "gpu0: GPU 1: 3 uncorrected memory errors since the driver was loaded"
    found[0]["errors"] = ()
    assert list(judged(found, on_cpu=False))[-1].finding == "none reported by the driver on gpu0, gpu1"


def test_what_torch_says_of_addresses_without_names_is_no_output_of_the_ranks():
    warning = "[W1123 16:02:11.123456789 socket.cpp:462] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    other = "[W1123 16:02:11.123456789 socket.cpp:767] [c10d] The client socket has timed out after 60000ms"
    lines = []
    printed = Command(argv=(sys.executable, "-c", f"print({warning!r}); print({other!r}); print('done')"), environment={})
    assert run_command(printed, lines.append).exit_code == 0
    assert lines == [other, "done"]


def test_real_ranks_are_measured_and_judged():
    from tprimat.probe.health import MARK

    assert MARK == READ
    command = [sys.executable, "-m", "tprimat", "doctor", "--nodes", "1", "--gpus", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["well"]
    assert [check["name"] for check in document["checks"]] == ["matrix product", "memory", "node all-reduce", "all-reduce"]
    assert "over 2 ranks on 1 node" in document["checks"][-1]["finding"]
