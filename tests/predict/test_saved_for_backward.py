"""What one layer of the engine's model keeps for the backward pass, to the byte."""

import json

import pytest
from changes import replace
from one_layer import printed_by
from planning import make_plan

from tprimat.core.implementations import EMBEDDED
from tprimat.core.models import model_shape, tiny
from tprimat.core.workload import FullWorkload, Layout
from tprimat.plan.schema import write_plan
from tprimat.predict.memory import layer_activations

CASES = {
    "llama": ("llama", 2, {}),
    "qwen": ("qwen", 1, {}),
    "wider": ("llama", 1, {"ffn": 384, "kv_heads": 32}),
    "mlp": ("llama", 2, {}),
    "core_attn": ("llama", 1, {}),
    "layernorm": ("llama", 1, {}),
    "norms of queries and keys": ("qwen3-8b", 2, {}),
    "experts": ("qwen3-30b-a3b", 2, {}),
    "wider experts": ("mixtral-8x7b", 1, {"expert_ffn": 256}),
    "latents and shared experts": ("deepseek-v2-lite", 2, {}),
    "llama in fp8": ("llama", 2, {}),
    "experts in fp8": ("qwen3-30b-a3b", 2, {}),
    "latents and shared experts in fp8": ("deepseek-v2-lite", 2, {}),
}
"""Model, sequences, and what its tiny shape has otherwise; the name has what is recomputed."""
SCALES = {"llama": 4, "experts": 2, "latents and shared experts": 6}
"""Scales of four bytes that a layer keeps in fp8: one for each product but those of routed experts."""
MODULES = ("core_attn", "layernorm", "mlp")


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Plan and saved bytes of each case, measured in one process."""
    folder = tmp_path_factory.mktemp("saved")
    settings = {
        "hardware.platforms.cpu.gpus_per_node": 1,
        "training.data.sequence_length": 64,
        "platform_optimizations.cpu.precision": "bf16",
    }
    plans = {}
    for name, (model, sequences, changes) in CASES.items():
        configured = model if model in {"llama", "qwen"} else "llama"
        plan = make_plan(folder, configured, settings | {"training.data.micro_batch_size": sequences})
        if model != configured:
            plan = replace(plan, shape=tiny(model_shape(model)))
        modules = tuple(module for module in MODULES if module in name)
        recompute = "selective" if modules else "none"
        plan = replace(plan, matmul_dtype="fp8" if "fp8" in name else plan.workload.matmul_dtype)
        plans[name] = replace(plan, shape=replace(plan.workload.shape, **changes), recompute=recompute, recompute_modules=modules)
        write_plan(folder / f"{name}.json", plans[name])
    lines = printed_by("saved_for_backward.py", [folder / f"{name}.json" for name in plans])
    saved = [json.loads(line) for line in lines[-len(plans) :]]
    return dict(zip(plans, zip(plans.values(), saved, strict=True), strict=True))


def predicted(plan):
    work = FullWorkload.of(
        shape=plan.workload.shape,
        layout=Layout(),
        micro_batch=plan.workload.micro_batch_sequences,
        accumulation_steps=1,
        sequence_tokens=plan.workload.sequence_tokens,
        implementation=EMBEDDED,
        matmul_dtype=plan.workload.matmul_dtype,
    )
    return layer_activations(work, moe=bool(plan.workload.shape.experts))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "fp8" not in name])
def test_a_layer_saves_what_is_predicted(layers, name):
    plan, saved = layers[name]
    kept = predicted(plan)
    mask = 4 if "core_attn" in plan.workload.recompute_modules else 0  # Megatron keeps the kind of mask as a number
    found = kept.without(kept.recomputed(plan.workload.recompute_modules)) + mask
    assert found == pytest.approx(saved, abs=0.2 * kept.router)  # of a router's small tensors, the loss decides which are kept


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALES)
def test_fp8_changes_what_a_layer_saves_as_predicted(layers, name):
    (wide, saved_wide), (small, saved) = layers[name], layers[f"{name} in fp8"]
    assert saved - saved_wide == predicted(small).total - predicted(wide).total + 4 * SCALES[name]
