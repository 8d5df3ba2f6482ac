"""What uncompiled element-wise operations read and write, counted operation by operation."""

import json

import pytest
from changes import replace
from one_layer import printed_by
from planning import make_plan

from tprimat.core.accelerators import find_accelerator
from tprimat.core.implementations import EMBEDDED, NEMO_ON_TORCH
from tprimat.core.workload import FullWorkload, Layout
from tprimat.plan.schema import write_plan
from tprimat.predict.rates import published_rates
from tprimat.predict.time import predict_time

EAGER = replace(EMBEDDED, eager_layers=True, eager_loss=True)
NEMO_QWEN = replace(NEMO_ON_TORCH, fused_activation=False)
CASES = {
    "embedded": ("llama", EAGER, {}),
    "embedded, wider": ("llama", EAGER, {"ffn": 1024, "hidden": 256}),
    "embedded, a key for each query": ("llama", EAGER, {"kv_heads": 32}),
    "embedded, norms of queries and keys": ("llama", EAGER, {"qk_norm": True}),
    "NeMo's Llama": ("llama", NEMO_ON_TORCH, {}),
    "NeMo's Qwen": ("qwen", NEMO_QWEN, {}),
    "NeMo's Qwen, wider": ("qwen", NEMO_QWEN, {"ffn": 1024, "hidden": 224}),
}
"""Model, implementation, and what its tiny shape has otherwise."""
RATES = published_rates(find_accelerator("NVIDIA H200"), 8)


def workload(shape, implementation, **changes):
    parts = {"layout": Layout(), "micro_batch": 4, "accumulation_steps": 1, "sequence_tokens": 64}
    return FullWorkload.of(shape=shape, implementation=implementation, **{**parts, **changes})


def predicted_bytes(part, *arguments, **changes):
    return predict_time(workload(*arguments, **changes), RATES).parts[part] * RATES.bandwidth


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Shape and bytes of a layer of each case, and the bytes of losses and Adam, counted in one process."""
    folder = tmp_path_factory.mktemp("moved")
    options = "platform_optimizations.cpu.engine_options"
    settings = {
        "hardware.platforms.cpu.gpus_per_node": 1,
        "training.data.sequence_length": 64,
        "training.data.micro_batch_size": 4,
        "platform_optimizations.cpu.precision": "bf16",
        f"{options}.compiled_regions": False,
        f"{options}.accumulate_weight_gradients": False,
    }
    shapes = {}
    for name, (model, code, changes) in CASES.items():
        plan = make_plan(folder, model, settings)
        shapes[name] = replace(plan.workload.shape, **changes)
        plan = replace(plan, shape=shapes[name], engine="megatron" if code is EAGER else "nemo")
        write_plan(folder / f"{name}.json", plan)
    lines = printed_by("moved_bytes.py", [folder / f"{name}.json" for name in CASES])
    *layers, others = (json.loads(line) for line in lines[-len(CASES) - 1 :])
    return {name: (shapes[name], found) for name, found in zip(CASES, layers, strict=True)}, others


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_uncompiled_layer_moves_what_is_predicted(counted, name):
    shape, found = counted[0][name]
    code = CASES[name][1]
    deep, shallow = (predicted_bytes("memory", replace(shape, layers=layers), code) for layers in (4, 3))
    angles = 64 * shape.head_dim  # of one sequence, whose cosines and sines each layer computes twice, and weights of norms
    assert 0 < found - (deep - shallow) < 128 * angles


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "code"), [("chunked", EAGER), ("native", replace(NEMO_ON_TORCH, loss="native"))])
def test_an_uncompiled_loss_moves_what_is_predicted(counted, loss, code):
    shape = replace(counted[0]["embedded"][0], vocabulary=8192)
    more = replace(shape, vocabulary=2 * 8192)
    seconds = predicted_bytes("memory", more, code) - predicted_bytes("memory", shape, code)
    assert seconds / (4 * 64 * 8192) == pytest.approx(counted[1][loss], rel=0.01)


@pytest.mark.slow
def test_an_uncompiled_adam_moves_what_is_predicted(counted):
    shape = counted[0]["embedded"][0]
    slow, fast = (predicted_bytes("optimizer", shape, replace(EMBEDDED, optimizer=name)) for name in ("eager", "one_pass"))
    norm, adam, copy = 4, 4 * 4 + 3 * 4, 4 + 2
    assert slow / fast == pytest.approx((norm + counted[1]["adam"]) / (norm + adam + copy), rel=0.001)
