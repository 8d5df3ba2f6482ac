"""The small training loops: their sizes, and that a step trains them."""

from dataclasses import replace

import pytest
import torch

from tprimat.core.flops import parameters
from tprimat.core.models import models as known_models
from tprimat.core.rows import DATA, document
from tprimat.probe import transformer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _same_weights_each_time():
    torch.manual_seed(1234)


PUBLISHED = {
    "Small": "30M",
    "Medium": "124M",
    "Large": "354M",
    "XL": "773M",
    "1.5B": "1.44B",
    "3B": "2.65B",
    "7B": "5.24B",
    "13B": "10.12B",
}


def test_the_models_that_are_built_have_the_published_weights_and_biases_beside_them():
    suite = [shape for shape in known_models().values() if "MI350X" in shape.source]
    for name, size in document(DATA / "probe_shapes.yaml")["transformer"].items():
        shape = transformer.model_shape(name, size)
        count = parameters(shape).total
        assert (f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M") == PUBLISHED[name]
        model = transformer.build(shape, torch.device("meta"))
        assert sum(weight.numel() for weight in model.parameters()) == count
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        published = next(one for one in suite if (one.layers, one.hidden) == (shape.layers, shape.hidden))
        assert parameters(replace(shape, linear_bias=False)).total == parameters(published).total
        assert 0 < count / parameters(published).total - 1 < 1e-3


def lowered(call):
    """By how much forty steps lower the loss of the batch that they see."""
    loss, _ = call.args
    before = loss().item()
    for _ in range(40):
        call()
    return before - loss().item()


def test_a_transformer_step_lowers_the_loss_of_the_batch_it_sees():
    size = document(DATA / "probe_shapes.yaml")["transformer_small"]["Small"]
    shape = transformer.model_shape("Small", size, small=True)
    assert lowered(transformer.prepare(shape, 2, False, CPU)) > 0.3


def test_seven_billion_at_the_published_rate_is_578_tflops_by_six_times_all_parameters():
    case = next(case for case in transformer.cases(small=False) if case.variant == "7B")
    assert 6 * case.shape["parameters"] * 18381 / 1e12 == pytest.approx(578.3, abs=0.2)
    tokens = case.shape["batch"] * case.shape["sequence"]
    square = 6 * case.shape["layers"] * case.shape["sequence"] * case.shape["hidden"]
    assert case.flop / tokens == pytest.approx(6 * case.shape["parameters"] + square, rel=0.002)


def test_the_three_layer_network_has_134_million_weights_and_learns():
    assert transformer.mlp_cases(small=False)[0].shape["weights"] == 134_217_728
    assert lowered(transformer.prepare_mlp((16, 32, 32, 16), CPU)) > 0.02
