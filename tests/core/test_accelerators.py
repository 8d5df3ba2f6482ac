"""The table of accelerators against figures read off data sheets, and against itself."""

import pytest

from tprimat.core.accelerators import accelerators, find_accelerator, peak_flops, recorded_name, resembling

DATA_SHEET_TERAFLOPS = [
    ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
    ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
    ("NVIDIA H100 PCIe", "bf16", 756),
    ("NVIDIA H200", "bf16", 989.4),
    ("NVIDIA A100-SXM4-80GB", "bf16", 312),
    ("Tesla V100-SXM2-32GB", "fp16", 125),
    ("NVIDIA H20", "bf16", 148),
    ("NVIDIA B200", "bf16", 2250),
    ("NVIDIA GB300", "fp8", 5000),
    ("NVIDIA L40S", "bf16", 362.05),
    ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ("AMD Instinct MI210", "bf16", 181),
    ("AMD Instinct MI300X", "bf16", 1307.4),
    ("AMD Instinct MI300A", "bf16", 980.6),
    ("AMD Instinct MI325X", "bf16", 1307.4),
    ("AMD Instinct MI350X", "bf16", 2306.9),
    ("AMD Instinct MI355X", "fp8", 5033.2),
    ("AMD Instinct MI355X", "fp4", 10066.3),
    ("NVIDIA B200", "fp4", 9000),
]


@pytest.mark.parametrize(("device_name", "dtype", "teraflops"), DATA_SHEET_TERAFLOPS)
def test_the_dense_peak_of_a_device_is_its_data_sheets(device_name, dtype, teraflops):
    assert peak_flops(device_name, dtype) == pytest.approx(teraflops * 1e12, rel=1e-9)


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H900",
        "AMD Instinct MI400X",
        "AMD Instinct MI250X / MI250",
        "gfx942",
        "gfx942:sramecc+:xnack-",
        "Intel(R) Xeon(R) Platinum 8480+",
        "",
        "NVIDIA",
        None,
    ],
)
def test_an_unknown_or_ambiguous_name_is_no_accelerator(device_name):
    assert find_accelerator(device_name) is None
    assert peak_flops(device_name, "bf16") is None


@pytest.mark.parametrize(
    ("device_name", "dtype"),
    [("NVIDIA A100-SXM4-80GB", "fp8"), ("Tesla V100-SXM2-32GB", "bf16"), ("NVIDIA H200", "fp4"), ("NVIDIA H200", "fp3")],
)
def test_a_dtype_that_a_chip_lacks_has_no_peak(device_name, dtype):
    assert find_accelerator(device_name) is not None
    assert peak_flops(device_name, dtype) is None


@pytest.mark.parametrize("accelerator", accelerators(), ids=lambda accelerator: accelerator.name)
def test_each_device_name_finds_its_own_entry_and_structured_sparsity_doubles_its_peak(accelerator):
    for name in (accelerator.name, *accelerator.device_names):
        assert find_accelerator(name) is accelerator
        assert find_accelerator(name.upper().replace(" ", "  ")) is accelerator
        assert recorded_name(name, accelerator.memory_bytes) == name
    for dtype, sparse in accelerator.sparse_flops.items():
        assert sparse == pytest.approx(2 * accelerator.dense_flops[dtype], rel=2e-3), dtype


def test_relatives_of_a_name_are_of_its_series():
    for name, first in (
        ("MI300", "MI300X"),
        ("A30", "A100 SXM 40GB"),
        ("RTX 4080", "RTX 4090"),
        ("TPU v5e", None),
        ("Ascend 910C", None),
    ):
        assert next((one.name for one in resembling(name)), None) == first
