"""How ranks, layers, heads and the batch divide: the rules of Megatron-Core, and what follows from a layout."""

import pytest
from plans import divide

from tprimat.core.errors import LayoutError
from tprimat.core.models import model_shape

LLAMA, QWEN = model_shape("llama-3.1-8b"), model_shape("qwen-2.5-7b")


def complaint(*arguments, **choices):
    with pytest.raises(LayoutError) as caught:
        divide(*arguments, **choices)
    return caught.value.what


@pytest.mark.parametrize(
    ("ranks", "layout", "data", "accumulation"),
    [
        (8, {}, 8, 16),
        (8, {"tp": 4}, 2, 64),
        (8, {"tp": 4, "pp": 2}, 1, 128),
        (8, {"tp": 2, "cp": 2}, 2, 64),
        (64, {"tp": 8, "pp": 4}, 2, 64),
        (16, {"pp": 2, "micro_batch_size": 4}, 8, 4),
        (1, {}, 1, 128),
    ],
)
def test_replicas_and_accumulation_follow_from_the_ranks_and_the_batch(ranks, layout, data, accumulation):
    made, micro = divide(LLAMA, ranks, **layout)
    assert (made.data, 128 // (micro * made.data), made.world_size) == (data, accumulation, ranks)


def test_what_is_stated_and_right_changes_nothing():
    assert divide(LLAMA, tp=2, dp=4, gradient_accumulation_steps=32) == divide(LLAMA, tp=2)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tp": 2, "dp": 8}, "data_parallel_size is 8, but 8 ranks leave 4."),
        ({"tp": 2, "gradient_accumulation_steps": 16}, "gradient_accumulation_steps is 16, but the batch gives 32."),
    ],
)
def test_what_is_stated_and_wrong_is_refused(layout, says):
    assert complaint(LLAMA, **layout) == says


def test_the_message_for_heads_is_megatrons_own():
    assert complaint(QWEN, tp=8) == "num_attention_heads (28) must be a multiple of tensor_model_parallel_size (8)."
    assert complaint(QWEN, ranks=14, tp=7) == "num_query_groups (4) must be a multiple of tensor_model_parallel_size (7)."


def test_virtual_stages_need_stages_whole_chunks_and_whole_rounds():
    made, _ = divide(LLAMA, tp=4, pp=2, vpp=4)
    assert made.virtual_pipeline == 4
    assert complaint(LLAMA, vpp=2) == "virtual_pipeline_model_parallel_size is 2, but there is a single pipeline stage."
    says = "The 16 layers of a stage must be a multiple of virtual_pipeline_model_parallel_size (3)."
    assert complaint(LLAMA, pp=2, vpp=3) == says
    says = "The 3 micro-batches of a step must be a multiple of pipeline_model_parallel_size (2)."
    assert complaint(LLAMA, ranks=2, pp=2, vpp=2, data={"global_batch_size": 3}) == says


def test_experts_divide_over_the_ranks_of_a_stage():
    mixture = model_shape("mixtral-8x7b")
    assert divide(mixture, ep=4)[0].expert == 4
    assert complaint(mixture, ep=3) == "num_moe_experts (8) must be a multiple of expert_model_parallel_size (3)."
    assert divide(mixture, tp=4, ep=8)[0].expert == 8  # over tensor ranks and replicas
    refused = "world_size (8) is not divisible by expert_tensor_model_pipeline_parallel size (16)."
    assert complaint(mixture, pp=2, ep=8) == refused
    assert complaint(LLAMA, ep=2) == "expert_model_parallel_size is 2, but llama-3.1-8b has no experts."


def test_experts_under_tensor_parallelism_need_sequence_parallelism():
    refused = "MoE and tensor parallelism are enabled without also enabling sequence parallelism."
    assert complaint(model_shape("mixtral-8x7b"), tp=2, ep=2, sequence_parallel=False) == refused
    assert divide(model_shape("mixtral-8x7b"), tp=2, ep=2)[0].sequence_parallel
