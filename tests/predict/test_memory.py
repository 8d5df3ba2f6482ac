"""Predicted memory against what H200 used, and against what must hold for any workload."""

from pathlib import Path

import plans
import pytest
from changes import replace

from tprimat.core.implementations import EMBEDDED, MEGATRON_TUNED, TRANSFORMER_ENGINE
from tprimat.core.models import model_shape
from tprimat.core.workload import Layout
from tprimat.predict.memory import predict_memory, state_bytes
from tprimat.predict.stages import stages_of, weights_of
from tprimat.records.discover import load_results
from tprimat.runner.explain import recorded_workload

H200 = Path(__file__).parents[2] / "benchmarks" / "records" / "h200"
MEASURED = [
    ("engine/dp_mbs1", 0.001),
    ("engine/tp2_pp2_mbs4", 0.001),
    ("two-gpus/engine/pp2_vpp2_mbs4", 0.005),
    ("fp8/dp_mbs4_fp8", 0.001),
    ("qwen3-8b/embedded-full-bf16", 0.006),
    ("with-transformer-engine/transformer_engine/dp_mbs4_fp8/1", 0.002),
    ("nemo/qwen_tp2_pp2_mbs4", 0.005),
    ("context-parallel/cp2_s32768_full", 0.001),
    ("short/pp2_vpp4_mbs2", 0.002),
]
"""Folder of a record, and how far the prediction may be off."""


def workload(**changes):
    return plans.workload(**{"layout": Layout(data=4), "micro_batch": 2, "accumulation_steps": 8, **changes})


@pytest.mark.parametrize(("folder", "error"), MEASURED)
def test_an_h200_used_what_is_predicted(folder, error):
    result = load_results([H200 / folder])[0][0]
    work = recorded_workload(result.run)
    used = max(step.peak_allocated_bytes for step in result.steps)
    assert predict_memory(work).allocated_bytes == pytest.approx(used, rel=error)


@pytest.mark.parametrize(
    ("changes", "bytes_of_a_weight"),
    [
        ({}, 2 + 4 + 12 / 4),
        ({"distributed_optimizer": False}, 2 + 4 + 12),
        ({"layout": Layout(tensor=4)}, (2 + 4 + 12) / 4),
        ({"matmul_dtype": "fp32"}, 4 + 4 + 8 / 4),
        ({"optimizer_states": "bf16"}, 2 + 2 + 4),
        ({"implementation": replace(EMBEDDED, shards_weights=True)}, (4 + 4 + 8) / 4),
    ],
)
def test_weights_gradients_and_states_are_counted(changes, bytes_of_a_weight):
    parts = predict_memory(workload(**changes)).parts
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states == pytest.approx(8_030_261_248 * bytes_of_a_weight, rel=1e-4)


def allocated(**changes):
    return predict_memory(workload(**changes)).allocated_bytes


def test_recomputation_and_parallelism_need_less():
    whole = allocated()
    assert allocated(recompute="full") < allocated(recompute="selective") < whole
    assert allocated(layout=Layout(tensor=2, data=2, sequence_parallel=True)) < allocated(layout=Layout(tensor=2, data=2))
    assert allocated(layout=Layout(context=2, data=2)) < whole
    assert allocated(recompute="full") < allocated(recompute="full", recompute_layers=8) < whole


def test_a_deeper_pipeline_holds_as_many_activations_on_its_first_stage():
    deep = [predict_memory(workload(layout=Layout(pipeline=stages), implementation=TRANSFORMER_ENGINE)) for stages in (2, 4)]
    assert deep[0].parts["activations"] == pytest.approx(deep[1].parts["activations"], rel=0.01)
    interleaved = workload(layout=Layout(pipeline=4, virtual_pipeline=2), implementation=TRANSFORMER_ENGINE)
    assert predict_memory(interleaved).parts["activations"] > deep[1].parts["activations"]


def test_the_fullest_stage_is_found_behind_stages_of_dense_layers():
    shape = model_shape("deepseek-v3")  # three dense layers; 61 layers on 32 stages begin 2 dense, 1 dense, 2 of experts
    layout, full = Layout(pipeline=32, data=16, expert=2), "full"
    work = workload(shape=shape, implementation=TRANSFORMER_ENGINE, layout=layout, recompute=full, expert_tensor_parallel=1)
    peak = predict_memory(work)
    assert peak.stage == 2
    assert peak.parts["weights"] == max(state_bytes(work, weights_of(work, stage))["weights"] for stage in stages_of(work))


def test_experts_are_spread_and_their_tokens_stay():
    shape = model_shape("mixtral-8x7b")
    alone, spread = (
        predict_memory(workload(shape=shape, implementation=TRANSFORMER_ENGINE, layout=Layout(expert=ranks, data=8)))
        for ranks in (1, 8)
    )
    assert spread.parts["weights"] < alone.parts["weights"] / 4
    assert spread.parts["activations"] == alone.parts["activations"]


def test_fp8_adds_copies_of_the_weights_and_halves_inputs():
    low, high = (predict_memory(workload(matmul_dtype=precision)) for precision in ("fp8", "bf16"))
    assert low.parts["8-bit copies"] == 2 * 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert low.parts["activations"] < high.parts["activations"]


def test_the_moment_of_the_peak_is_named():
    assert "loss" in predict_memory(workload()).moment
    assert predict_memory(workload(layout=Layout(pipeline=4))).moment == "backward pass of a layer"


def test_gradients_that_are_summed_in_fp32_exist_twice_when_activations_are_gone():
    """As reduce_scatter_with_fp32_accumulation of Megatron-Core holds the output of its all-to-all until the end of the pass."""
    small = {"implementation": MEGATRON_TUNED, "micro_batch": 1, "accumulation_steps": 1, "recompute": "full"}
    summed = predict_memory(workload(**small, sums_in_fp32=True))
    assert summed.moment == "update of the weights"
    assert summed.parts["gradients"] == 2 * summed.parts["weights"] > predict_memory(workload(**small)).parts["gradients"]
    large = {**small, "micro_batch": 16, "recompute": "none"}
    assert allocated(**large, sums_in_fp32=True) == allocated(**large)
