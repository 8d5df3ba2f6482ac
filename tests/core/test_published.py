"""Published figures, rebased, against conversions that were worked out by hand."""

import pytest

from tprimat.core.accelerators import find_accelerator
from tprimat.core.flops import flop_per_token, parameters
from tprimat.core.models import model_shape, models
from tprimat.core.published import rebase, results, sizes

BY_NAME = {result.name: result for result in results()}


@pytest.mark.parametrize(
    ("name", "teraflops", "mfu"),
    [
        ("dgx-cloud-llama-3.1-8b-bf16", 528, 0.534),
        ("dgx-cloud-llama-3.1-8b-fp8", 714, 0.361),
        ("megatron-bridge-llama-3-8b-fp8", 744, 0.376),
        ("torchtitan-llama-3.1-8b-eager", 297, None),
        ("torchtitan-llama-3.1-8b-compiled", 343, None),
        ("torchtitan-llama-3.1-8b-float8", 439, None),
        ("torchtitan-llama-3.1-8b-h200-float8", 563, 0.2845),
        ("torchao-llama-3-8b-mi300x-bf16", 277, 0.212),
        ("torchao-llama-3-8b-mi300x-fp8", 317, 0.121),
        ("tprimat-h100-llama", 345, 0.349),
    ],
)
def test_results_are_rebased_to_half_the_square_and_the_dense_peak(name, teraflops, mfu):
    rebased = rebase(BY_NAME[name])
    assert rebased.flops_per_second_per_gpu / 1e12 == pytest.approx(teraflops, abs=0.6)
    assert rebased.mfu == (None if mfu is None else pytest.approx(mfu, abs=6e-4))


def test_tokens_that_carry_loss_have_no_flop():
    """As our own records of torchtune, which are refused an MFU."""
    rows = [row for row in results() if row.engine == "torchtune"]
    assert len(rows) == 2
    assert all(rebase(row).flops_per_second_per_gpu is None and rebase(row).mfu is None for row in rows)


def test_a_printed_mfu_is_met_in_its_own_convention():
    assert rebase(BY_NAME["dgx-cloud-llama-3.1-8b-bf16"]).own_mfu == pytest.approx(0.5999, abs=5e-4)
    assert rebase(BY_NAME["llm-foundry-mpt-7b"]).own_mfu == pytest.approx(0.4644, abs=5e-4)
    assert rebase(BY_NAME["megatron-462b"]).own_mfu == pytest.approx(459.9 / 989.4, rel=1e-9)


def test_an_mfu_against_the_sparse_peak_is_half_of_what_the_chip_does():
    result = BY_NAME["tprimat-h100-llama"]
    assert rebase(result).own_mfu == pytest.approx(2 * result.mfu, abs=2e-3)


def test_a_throughput_that_contradicts_its_mfu_shows():
    """390 TFLOP/s of 989.4 are 39.4 %, not 47 %."""
    result = BY_NAME["core-page-gpt-3-175b"]
    assert rebase(result).own_mfu is not None
    assert result.mfu - rebase(result).own_mfu == pytest.approx(0.076, abs=1e-3)


def test_a_step_that_is_faster_than_the_chip_shows():
    assert rebase(BY_NAME["core-page-gpt-3-175b-example"]).mfu > 1


def test_what_a_source_does_not_say_stays_absent():
    rebased = rebase(BY_NAME["llm-foundry-mpt-7b"])
    assert (rebased.flops_per_second_per_gpu, rebased.mfu) == (None, None)
    assert rebase(BY_NAME["mi350x-gpt-7b"]).mfu is None


@pytest.mark.parametrize("result", results(), ids=lambda result: result.name)
def test_each_result_refers_to_things_that_exist(result):
    assert result.source
    assert result.shape is None or result.shape in models()
    assert result.accelerator is None or find_accelerator(result.accelerator)
    assert result.tokens_per_second_per_gpu or result.flops_per_second_per_gpu or result.mfu
    assert result.mfu is None or 0 < result.mfu < 1
    ranks = (
        (result.workload.tensor_parallel or 1)
        * (result.workload.pipeline_parallel or 1)
        * (result.workload.context_parallel or 1)
    )
    assert result.gpus % ranks == 0
    if result.workload.expert_parallel:
        assert models()[result.shape].experts % result.workload.expert_parallel == 0
        assert result.gpus // (result.workload.pipeline_parallel or 1) % result.workload.expert_parallel == 0


def test_nvidia_counts_the_flop_of_these_models_as_we_do():
    """Megatron-Bridge prints tokens/s and FLOP/s of each run: their ratio is the FLOP of a token, and so a check of the shape."""
    rows = [row for row in results() if row.engine == "megatron-bridge" and row.flops_per_second_per_gpu]
    assert {row.shape for row in rows} >= {"llama-3-8b", "llama-3-70b", "llama-3.1-405b", "qwen3-30b-a3b", "deepseek-v3"}
    for row in rows:
        counted = row.tokens_per_second_per_gpu * flop_per_token(model_shape(row.shape), row.workload.sequence_tokens)
        assert counted == pytest.approx(row.flops_per_second_per_gpu, rel=0.006), row.name


def test_result_names_are_unique():
    assert len(BY_NAME) == len(results())


def test_sizes_that_authors_print_hold_and_those_of_the_core_page_do_not():
    for size in sizes():
        close = parameters(model_shape(size.shape)).total == pytest.approx(size.total, rel=0.005)
        assert close == ("Megatron-Core" not in size.source), size


def test_active_weights_that_authors_print_hold_to_their_last_digit():
    for size in sizes():
        if size.active is not None and "Megatron-Core" not in size.source:
            count = parameters(model_shape(size.shape))
            active = count.active if size.active_has_input_table else count.active - count.embedding
            rounding = 0.017 if size.active in {3.3e9, 37e9} else 0.005  # two digits, the first of them cut and not rounded
            assert active == pytest.approx(size.active, rel=rounding), size
