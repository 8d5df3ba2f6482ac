"""The pieces of a training step: each is the operation that its name says, and predictions use what was measured."""

import pytest
import torch
from changes import replace
from plans import workload

from tprimat.core.accelerators import find_accelerator
from tprimat.predict.rates import BESIDE, UNDER_LOAD, probed_rates
from tprimat.predict.time import predict_time
from tprimat.probe import collectives, pieces
from tprimat.probe.case import empty_record, measure, open_bench
from tprimat.probe.gemm import Product

CPU = torch.device("cpu")
H200 = find_accelerator("NVIDIA H200")


@pytest.fixture(scope="module")
def bench():
    return open_bench(device=CPU)


def test_a_weight_gradient_is_added_to_its_sum():
    call = pieces.prepare_pass("wgrad", Product(m=32, k=64, n=16), "bf16", CPU)
    first = call().clone()
    assert first.dtype == torch.float32
    assert torch.allclose(call(), 2 * first)


@pytest.mark.parametrize("kind", ["grouped_fprop", "grouped_dgrad", "grouped_wgrad"])
def test_grouped_products_are_each_experts_own(kind):
    counts = [48, 0, 16]
    call = pieces.prepare_grouped(kind, counts, (32, 64), "bf16", CPU)
    rows, weights = call.args
    result = call()
    for number, (part, start) in enumerate(zip(counts, (0, 48, 48), strict=True)):
        own = slice(start, start + part)
        if kind == "grouped_wgrad":
            expected, product = rows[:, own] @ weights[own], result[number]
        else:
            expected, product = rows[own] @ weights[number], result[own]
        assert torch.allclose(product.float(), expected.float(), rtol=0.05, atol=0.5)


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("total", "experts"), [(16384, 8), (65536, 128)])
def test_no_row_is_lost_and_only_skewed_experts_differ(total, experts, skewed):
    counts = pieces.rows_of_experts(total, experts, skewed=skewed)
    assert (len(counts), sum(counts)) == (experts, total)
    assert all(count % pieces.ALIGNMENT == 0 for count in counts)
    assert (max(counts) > 1.8 * total / experts) == skewed


def test_a_region_gives_the_gradients_of_all_its_inputs():
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(2)] + [torch.randn(8, requires_grad=True)]
    gradients = pieces.forward_and_backward(pieces.sum_and_norm, inputs)()
    assert [gradient.shape for gradient in gradients] == [(4, 8), (4, 8), (8,)]
    assert torch.equal(gradients[0], gradients[1])  # a sum passes its gradient on to both


def test_every_piece_is_measured_or_refused_with_a_reason(bench):
    one_of_each = {
        (case.kind, case.variant if case.kind in {"region", "launch"} else ""): case for case in pieces.cases(small=True)
    }
    assert {kind for kind, _ in one_of_each} == {
        *("fprop", "dgrad", "wgrad", "grouped_fprop", "grouped_dgrad", "grouped_wgrad"),
        *("attention_forward", "attention_backward", "region", "launch"),
    }
    for case in one_of_each.values():
        record = measure(replace(case, effort=replace(case.effort, repetitions=2)), bench)
        assert bool(record.seconds) != bool(record.error), case.title


def probes(bench, **speeds):
    """Records of H200's pieces, all products at 500 TFLOP/s, but some kinds as given."""
    made = []
    for case in [*pieces.cases(small=False), *collectives.overlap_cases(2, small=False)]:
        seconds = (case.flop or 0) / speeds.get(case.kind, 500e12) or 1e-3
        if case.kind == "region":
            seconds = case.bytes / speeds["region"]
        if case.kind == "launch":
            seconds = case.shape["launches"] * speeds["launch"]
        if case.kind == "overlapped":
            both = 12e-3 if case.shape.get("message_bytes") == 2**28 else 16e-3
            seconds = {"products": 10e-3}.get(case.variant, both if case.variant.endswith(BESIDE) else 8e-3)
        made.append(replace(empty_record(case, bench), seconds=(seconds,) * 6))
    return made


def test_predictions_use_what_was_measured(bench):
    rates = probed_rates(probes(bench, wgrad=400e12, region=3e12, launch=7e-6, grouped_fprop=300e12), H200, 8)
    assert rates.product_seconds(4096, 4096, 8192, "bf16", "wgrad") == pytest.approx(2 * 4096 * 4096 * 8192 / 400e12)
    assert rates.product_seconds(4096, 4096, 8192, "bf16", "dgrad") == pytest.approx(2 * 4096 * 4096 * 8192 / 500e12)
    assert rates.product_seconds(2048, 28672, 4096, "bf16", "grouped_fprop") == pytest.approx(2 * 2048 * 28672 * 4096 / 300e12)
    assert (rates.region_bandwidth, rates.launch_seconds) == (pytest.approx(3e12), pytest.approx(7e-6))
    assert rates.overlapped_share(2**28) == pytest.approx(0.25)  # 2 of 8 ms stay visible
    assert rates.overlapped_share(2**20) == pytest.approx(0.75)  # small messages hide worse


def test_attention_is_predicted_by_heads_of_the_same_width(bench):
    probed = [
        replace(empty_record(case, bench), seconds=(case.flop / (200e12 if case.shape["head_dim"] == 64 else 500e12),) * 6)
        for case in pieces.cases(small=False)
        if case.kind.startswith("attention")
    ]
    rates = probed_rates(probed, H200, 8)
    for width, rate in ((64, 200e12), (128, 500e12), (96, 500e12)):
        assert rates.attention_seconds(1e12, 2048, 64, width, backward=True) == pytest.approx(1e12 / rate)


def test_fp8_gradients_are_predicted_by_products_whose_partial_sums_move_to_fp32(bench):
    speed = {"fprop": 1200e12, "dgrad": 900e12}
    cases = pieces.product_cases("fp8", small=False)
    rates = probed_rates(
        [replace(empty_record(case, bench), seconds=(case.flop / speed[case.kind],) * 6) for case in cases], H200, 8
    )
    for kind, rate in (("fprop", 1200e12), ("dgrad", 900e12), ("wgrad", 900e12)):
        assert rates.product_seconds(4096, 4096, 8192, "fp8", kind) == pytest.approx(2 * 4096 * 4096 * 8192 / rate)
    assert not rates.adds_gradients("fp8", "wgrad")  # their sum in fp32 is counted besides


def test_a_product_of_fp8_gradients_is_that_of_its_operands():
    call = pieces.prepare_pass("dgrad", Product(m=16, k=32, n=48), "fp8", CPU)
    (left, right), product = call.args[:2], call()
    assert (left.dtype, right.dtype, product.shape) == (torch.float8_e5m2, torch.float8_e4m3fn, (16, 48))


def test_a_sum_that_the_product_contains_is_not_counted_twice(bench):
    rates = probed_rates(probes(bench, wgrad=500e12, region=4e12, launch=1e-6), H200, 8)
    apart = replace(rates, passes={key: value for key, value in rates.passes.items() if key[1] != "wgrad"})
    assert predict_time(workload(), rates).parts["products"] < predict_time(workload(), apart).parts["products"]


def test_a_clock_that_load_lowers_lowers_what_is_predicted(bench):
    case = next(case for case in pieces.cases(small=False) if case.kind == "fprop")

    def both(slower, dtype="bf16"):
        kinds = (("gemm_warm", 1.0), ("gemm_sustained", slower))
        return [
            replace(empty_record(case, bench), kind=kind, dtype=dtype, seconds=(case.flop / 500e12 * times,) * 6)
            for kind, times in kinds
        ]

    loaded = probes(bench, region=4e12, launch=1e-6)
    measured = [replace(record, variant=record.variant.removesuffix(UNDER_LOAD)) for record in loaded]
    free, capped = (probed_rates([*measured, *more], H200, 8) for more in ([], [*both(1.25), *both(1.5, "fp8")]))
    for kind in ("fprop", "dgrad"):
        seconds = [rates.product_seconds(4096, 4096, 4096, "bf16", kind) for rates in (free, capped)]
        assert seconds[1] == pytest.approx(1.25 * seconds[0])
    attention = [rates.attention_seconds(1e12, 4096, 64, 128, backward=True) for rates in (free, capped)]
    assert attention[1] == pytest.approx(1.25 * attention[0])
    assert probed_rates([*measured, *both(0.9)], H200, 8).flops == free.flops  # noise makes nothing faster
    # A product under load has that clock already, and displaces what a burst of it reached.
    slow = [replace(record, seconds=tuple(2 * value for value in record.seconds)) for record in loaded]
    seen = probed_rates([*measured, *slow, *both(1.25)], H200, 8)
    assert seen.product_seconds(4096, 4096, 4096, "bf16", "dgrad") == pytest.approx(2 * 2 * 4096**3 / 500e12)
