"""Published figures, rebased, against conversions that were worked out by hand."""

import pytest

from tprimat.core.flops import flop_per_token
from tprimat.core.models import model_shape
from tprimat.core.published import rebase, results

BY_NAME = {result.name: result for result in results()}


@pytest.mark.parametrize(
    ("name", "teraflops", "mfu"),
    [
        ("dgx-cloud-llama-3.1-8b-bf16", 528, 0.534),
        ("dgx-cloud-llama-3.1-8b-fp8", 714, 0.361),
        ("megatron-bridge-llama-3-8b-fp8", 744, 0.376),
        ("torchtitan-llama-3.1-8b-eager", 297, 0.2997),
        ("torchtitan-llama-3.1-8b-compiled", 343, 0.3468),
        ("torchtitan-llama-3.1-8b-float8", 439, 0.2219),
        ("torchtitan-llama-3.1-8b-h200-float8", 563, 0.2845),
        ("torchao-llama-3-8b-mi300x-bf16", 277, 0.212),
        ("torchao-llama-3-8b-mi300x-fp8", 317, 0.121),
        ("tprimat-h100-llama", 345, 0.349),
    ],
)
def test_results_are_rebased_to_half_the_square_and_the_dense_peak(name, teraflops, mfu):
    rebased = rebase(BY_NAME[name])
    assert rebased.flops_per_second_per_gpu / 1e12 == pytest.approx(teraflops, abs=0.6)
    assert rebased.mfu == pytest.approx(mfu, abs=6e-4)


def test_tokens_that_carry_loss_have_no_flop():
    """As our own records of torchtune, which are refused an MFU."""
    rows = [row for row in results() if row.engine == "torchtune"]
    assert len(rows) == 2
    assert all(rebase(row).flops_per_second_per_gpu is None and rebase(row).mfu is None for row in rows)


def test_each_result_refers_to_things_that_exist():
    for result in results():
        work = result.workload
        assert result.tokens_per_second_per_gpu or result.flops_per_second_per_gpu or result.mfu, result.name
        assert result.mfu is None or 0 < result.mfu < 1, result.name
        pipeline, expert = work.pipeline_parallel or 1, work.expert_parallel or 1
        assert result.gpus % ((work.tensor_parallel or 1) * pipeline * (work.context_parallel or 1)) == 0, result.name
        assert work.shape is None or (work.shape.experts or expert) % expert == 0, result.name
        assert result.gpus // pipeline % expert == 0, result.name


def test_nvidia_counts_the_flop_of_these_models_as_we_do():
    """Megatron-Bridge prints tokens/s and FLOP/s of each run: their ratio is the FLOP of a token, and so a check of the shape.

    Later releases round tokens to a multiple of 128.
    """
    rows = [
        row
        for row in results()
        if row.engine == "megatron-bridge" and row.flops_per_second_per_gpu and row.tokens_per_second_per_gpu
    ]
    assert {row.shape for row in rows} >= {"llama-3-8b", "llama-3-70b", "llama-3.1-405b", "qwen3-30b-a3b", "deepseek-v3"}
    for row in rows:
        counted = row.tokens_per_second_per_gpu * flop_per_token(model_shape(row.shape), row.workload.sequence_tokens)
        assert counted == pytest.approx(row.flops_per_second_per_gpu, rel=0.013), row.name
