"""Rates from samples, against published tables and nccl-tests' definitions."""

import pytest
from runs.make_runs import a_run

from tprimat.analyze import probes
from tprimat.analyze.probes import gemm_ceiling
from tprimat.records.schema import Machine, ProbeRecord

MI350X = Machine(
    platform="rocm", accelerator="AMD Instinct MI350X", gpus_per_node=1, nodes=1, driver="6.14", power_limit_watts=1000.0
)
SOFTWARE = {"torch": "2.9.0"}
BF16_TABLE = {
    (8192, 8192, 8192): (0.996, 1104),
    (16384, 8192, 7168): (1.757, 1095),
    (16384, 16384, 16384): (8.309, 1059),
    (16384, 3584, 8192): (0.927, 1038),
    (16384, 1024, 8192): (0.269, 1023),
    (4096, 4096, 4096): (0.142, 969),
    (16384, 8192, 1280): (0.381, 901),
}
"""(m, k, n) -> milliseconds, TFLOP/s, as a published MI350X suite printed them."""


def product(m, k, n, milliseconds, **changes):
    fields = {
        "kind": "gemm",
        "variant": "torch.matmul",
        "shape": {"m": m, "k": k, "n": n},
        "dtype": "bf16",
        "seconds": (milliseconds / 1e3,) * 8,
        "flop": 2 * m * n * k,
        "machine": MI350X,
        "software": SOFTWARE,
        "started_at": "2026-01-08T10:00:00+00:00",
    }
    return ProbeRecord(**fields | changes)


TABLE = [product(*shape, milliseconds) for shape, (milliseconds, _) in BF16_TABLE.items()]


@pytest.mark.parametrize(("shape", "row"), BF16_TABLE.items())
def test_rates_are_the_published_ones(shape, row):
    milliseconds, published = row
    rate = probes.flop_rate(product(*shape, milliseconds)) / 1e12
    assert rate == pytest.approx(published, rel=0.005)


def test_efficiency_is_of_the_dense_peak_of_this_very_accelerator():
    record = product(16384, 16384, 16384, 2 * 16384**3 / 1022e12 * 1e3)
    assert probes.share_of_peak(record) == pytest.approx(1022 / 2307, rel=0.01)
    unknown = Machine(platform="rocm", accelerator="AMD Instinct MI999", gpus_per_node=1, nodes=1)
    assert probes.share_of_peak(product(64, 64, 64, 1.0, machine=unknown)) is None


def test_a_refusal_has_no_rate():
    refused = product(64, 64, 64, 1.0, seconds=(), error="RuntimeError: no kernel")
    assert probes.flop_rate(refused) is None
    assert probes.share_of_peak(refused) is None
    assert probes.fastest([refused]) is None


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("send_recv", 1.0)],
)
def test_bus_bandwidth_over_four_ranks_follows_nccl_tests(kind, factor):
    record = product(1, 1, 1, 4.0, kind=kind, shape={"message_bytes": 2**30, "ranks": 4}, flop=None, bytes=2**30)
    assert probes.bandwidth(record) == pytest.approx(2**30 / 4e-3)
    assert probes.bus_bandwidth(record) == pytest.approx(factor * 2**30 / 4e-3)


def test_a_page_holds_the_newest_setting_and_the_newest_record_of_each_operation():
    old_driver = Machine(platform="rocm", accelerator="AMD Instinct MI350X", gpus_per_node=1, nodes=1, driver="6.10")
    stale = product(64, 64, 64, 9.0, machine=old_driver, started_at="2026-01-01T00:00:00+00:00")
    first = product(64, 64, 64, 2.0, started_at="2026-01-02T00:00:00+00:00")
    second = product(64, 64, 64, 1.0, started_at="2026-01-03T00:00:00+00:00")
    refused = product(64, 64, 64, 1.0, seconds=(), error="out of memory", started_at="2026-01-04T00:00:00+00:00")
    assert probes.newest_of_each([refused, second, stale, first]) == [second]
    assert probes.newest_of_each([]) == []


def test_the_ceiling_is_the_fastest_product_in_the_runs_dtype():
    fp8 = product(8192, 8192, 8192, 0.5, dtype="fp8")
    candidate = product(8192, 8192, 8192, 0.1, kind="gemm_search")
    assert gemm_ceiling(a_run("r", machine=MI350X, software=SOFTWARE), [*TABLE, fp8, candidate]) == pytest.approx(
        1104e12, rel=0.001
    )
