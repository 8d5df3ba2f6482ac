"""The table of accelerators against figures read off data sheets, and against itself."""

import pytest

from tprimat.core.accelerators import DTYPES, accelerators, find_accelerator, peak_dense_flops

DATA_SHEET_TERAFLOPS = [
    ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
    ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
    ("NVIDIA H100 PCIe", "bf16", 756),
    ("NVIDIA H100 NVL", "bf16", 835.5),
    ("NVIDIA H200", "bf16", 989.4),
    ("NVIDIA H200 NVL", "bf16", 835.5),
    ("NVIDIA A100-SXM4-80GB", "bf16", 312),
    ("A100-SXM4-40GB", "tf32", 156),
    ("NVIDIA A100 80GB PCIe", "fp16", 312),
    ("NVIDIA A100-PCIE-40GB", "bf16", 312),
    ("Tesla V100-SXM2-32GB", "fp16", 125),
    ("Tesla V100-PCIE-32GB", "fp16", 112),
    ("NVIDIA H20", "bf16", 148),
    ("NVIDIA B200", "bf16", 2250),
    ("NVIDIA GB200", "fp8", 5000),
    ("NVIDIA B300 SXM6 AC", "bf16", 2250),
    ("NVIDIA GB300", "fp8", 5000),
    ("NVIDIA L40S", "bf16", 362.05),
    ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ("AMD Instinct MI210", "bf16", 181),
    ("AMD Instinct MI250X", "bf16", 191.5),
    ("AMD Instinct MI300X", "bf16", 1307.4),
    ("AMD Instinct MI300X VF", "fp8", 2614.9),
    ("AMD Instinct MI300A", "bf16", 980.6),
    ("AMD Instinct MI325X", "bf16", 1307.4),
    ("AMD Instinct MI350X", "bf16", 2306.9),
    ("AMD Instinct MI355X", "fp8", 5033.2),
    ("AMD Instinct MI355X", "fp4", 10066.3),
    ("NVIDIA B200", "fp4", 9000),
]


@pytest.mark.parametrize(("device_name", "dtype", "teraflops"), DATA_SHEET_TERAFLOPS)
def test_the_dense_peak_of_a_device_is_its_data_sheets(device_name, dtype, teraflops):
    assert peak_dense_flops(device_name, dtype) == pytest.approx(teraflops * 1e12, rel=1e-9)


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H800",
        "AMD Instinct MI308X",
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
    assert peak_dense_flops(device_name, "bf16") is None


@pytest.mark.parametrize(
    ("device_name", "dtype"),
    [("NVIDIA A100-SXM4-80GB", "fp8"), ("Tesla V100-SXM2-32GB", "bf16"), ("NVIDIA H200", "fp4"), ("NVIDIA H200", "fp3")],
)
def test_a_dtype_that_a_chip_lacks_has_no_peak(device_name, dtype):
    assert find_accelerator(device_name) is not None
    assert peak_dense_flops(device_name, dtype) is None


def test_the_three_h100_are_told_apart():
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"]
    assert [find_accelerator(name).name for name in names] == ["H100 SXM", "H100 PCIe", "H100 NVL"]


@pytest.mark.parametrize("accelerator", accelerators(), ids=lambda accelerator: accelerator.name)
def test_each_device_name_finds_its_own_entry(accelerator):
    for name in (accelerator.name, *accelerator.device_names):
        assert find_accelerator(name) is accelerator
        assert find_accelerator(name.upper().replace(" ", "  ")) is accelerator


def test_names_are_unique():
    names = [accelerator.name for accelerator in accelerators()]
    devices = [name for accelerator in accelerators() for name in accelerator.device_names]
    assert len(set(names)) == len(names)
    assert len(set(devices)) == len(devices)


@pytest.mark.parametrize("accelerator", accelerators(), ids=lambda accelerator: accelerator.name)
def test_structured_sparsity_doubles_the_dense_peak(accelerator):
    for dtype, sparse in accelerator.sparse_flops.items():
        assert sparse == pytest.approx(2 * accelerator.dense_flops[dtype], rel=2e-3), dtype


@pytest.mark.parametrize("accelerator", accelerators(), ids=lambda accelerator: accelerator.name)
def test_figures_have_the_magnitude_of_an_accelerator(accelerator):
    assert 16e9 <= accelerator.memory_bytes <= 400e9
    assert 0.8e12 <= accelerator.bandwidth_bytes_per_second <= 10e12
    assert 250 <= accelerator.tdp_watts <= 1500
    assert 30e9 <= accelerator.link_bytes_per_second <= 2e12
    assert set(accelerator.dense_flops) <= set(DTYPES)
    peaks = [
        accelerator.dense_flops[dtype] for dtype in ("fp32", "tf32", "fp16", "fp8", "fp4") if dtype in accelerator.dense_flops
    ]
    assert peaks == sorted(peaks)
    assert all(1e13 <= peak <= 2e16 for peak in peaks)
    assert accelerator.source


@pytest.mark.parametrize(
    ("device_name", "dtype", "units", "flop_per_clock", "gigahertz"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 80, 1024, 1.53),
        ("NVIDIA A100-SXM4-80GB", "bf16", 108, 2048, 1.41),
        ("NVIDIA H100 80GB HBM3", "bf16", 132, 4096, 1.83),
        ("NVIDIA H100 PCIe", "bf16", 114, 4096, 1.62),
        ("NVIDIA H200", "fp8", 132, 8192, 1.83),
        ("NVIDIA GeForce RTX 4090", "bf16", 128, 512, 2.52),
        ("AMD Instinct MI210", "bf16", 104, 1024, 1.7),
        ("AMD Instinct MI250", "bf16", 104, 1024, 1.7),
        ("AMD Instinct MI250X", "bf16", 110, 1024, 1.7),
        ("AMD Instinct MI300A", "bf16", 228, 2048, 2.1),
        ("AMD Instinct MI300X", "bf16", 304, 2048, 2.1),
        ("AMD Instinct MI300X", "fp32", 304, 256, 2.1),
        ("AMD Instinct MI350X", "bf16", 256, 4096, 2.2),
        ("AMD Instinct MI355X", "fp8", 256, 8192, 2.4),
        ("AMD Instinct MI350X", "fp4", 256, 16384, 2.2),
        ("AMD Instinct MI355X", "fp4", 256, 16384, 2.4),
    ],
)
def test_a_peak_is_units_times_rate_times_boost_clock(device_name, dtype, units, flop_per_clock, gigahertz):
    """Units (SM or CU), FLOP a clock and unit, and the clock, as the architectures' white papers give them."""
    assert peak_dense_flops(device_name, dtype) == pytest.approx(units * flop_per_clock * gigahertz * 1e9, rel=3e-3)
