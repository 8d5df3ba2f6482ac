"""`tprimat doctor`: errors of GPUs that drivers and the kernel report, named."""

import json

from commands import fake_nvml

from tprimat.hardware import health
from tprimat.hardware.gpus import visible_gpus
from tprimat.hardware.health import check_errors


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
