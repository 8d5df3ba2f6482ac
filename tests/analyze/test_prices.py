"""The price of a GPU hour: one lookup for the summary of a run and for a comparison."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tprimat.analyze.groups import measure, price_of
from tprimat.analyze.metrics import MetricOptions
from tprimat.records.discover import load_results
from tprimat.runner.run import metrics_of

RUNS = Path(__file__).parent.parent / "runs"
RESULT = next(result for result in load_results([RUNS / "h100"])[0] if result.run.run_id.endswith("llama-0"))


@pytest.mark.parametrize("name", ["H100 SXM", "NVIDIA H100 80GB HBM3"])
def test_a_price_by_short_name_or_device_name_counts_in_the_summary_and_in_a_comparison(name, tmp_path):
    assert RESULT.run.machine.accelerator == "NVIDIA H100 80GB HBM3"
    prices = {"MI300X": 2.0, name: 2.5}
    benchmarking = SimpleNamespace(flops_convention="causal", warmup_steps="auto", cloud_costs=prices)
    loaded = SimpleNamespace(config=SimpleNamespace(benchmarking=benchmarking))
    session = SimpleNamespace(loaded=loaded, output=tmp_path, probes=())
    summarized, _ = metrics_of(session, RESULT.run, tuple(RESULT.steps))
    compared = measure(RESULT, MetricOptions(), prices).metrics
    million_tokens_hours = 1e6 / compared.tokens_per_second_per_gpu.value / 3600
    assert summarized.cost_per_million_tokens == compared.cost_per_million_tokens
    assert compared.cost_per_million_tokens == pytest.approx(2.5 * million_tokens_hours)


def test_the_price_of_another_gpu_is_not_taken():
    assert price_of(RESULT.run, {"H100 PCIe": 2.0, "H200": 3.5}) is None
