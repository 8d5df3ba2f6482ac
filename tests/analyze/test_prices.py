"""The price of a GPU hour: one lookup for the summary of a run and for a comparison."""

from pathlib import Path

from tprimat.analyze.groups import price_of
from tprimat.records.discover import read_result

RUN = read_result(Path(__file__).parent.parent / "runs" / "h100" / "runs" / "h100-llama-0").run


def test_a_price_is_found_by_short_name_or_device_name_and_that_of_another_gpu_is_not_taken():
    assert RUN.machine.accelerator == "NVIDIA H100 80GB HBM3"
    for name in ("H100 SXM", "NVIDIA H100 80GB HBM3"):
        assert price_of(RUN, {"MI300X": 2.0, name: 2.5}) == 2.5
    assert price_of(RUN, {"H100 PCIe": 2.0, "H200": 3.5}) is None
