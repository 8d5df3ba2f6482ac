"""What runs is seen in the modules: a layer that is recomputed runs first without gradients, whatever its configuration says."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tprimat.train import layer_watch as watch
from tprimat.train.observed import scaling_and_attention

CPU = torch.device("cpu")


class Attention(torch.nn.Module):
    def forward(self, x):
        return x.square()


class Layer(torch.nn.Module):
    """A layer whose attention may be recomputed, with the names of Megatron's modules."""

    def __init__(self, recomputes):
        super().__init__()
        self.self_attention = torch.nn.Module()
        self.self_attention.core_attention = Attention()
        self.recomputes = recomputes

    def forward(self, hidden_states):
        attention = self.self_attention.core_attention
        return hidden_states + (
            checkpoint(attention, hidden_states, use_reentrant=True) if self.recomputes else attention(hidden_states)
        )


@pytest.fixture
def tensor_ranks(monkeypatch):
    """Two tensor ranks that share a sequence of 32 tokens, as Megatron's parallel state says."""
    state = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2, get_context_parallel_world_size=lambda: 1)
    monkeypatch.setattr(watch, "parallel_state", state)


@pytest.mark.parametrize(
    ("recomputes", "around", "seen"),
    [
        (False, lambda layer, x: layer(hidden_states=x), {"recompute": "none"}),
        (True, lambda layer, x: layer(hidden_states=x), {"recompute": "selective", "recompute_modules": ("core_attn",)}),
        (False, lambda layer, x: checkpoint(layer, x, use_reentrant=True), {"recompute": "full"}),
    ],
)
def test_what_is_recomputed_is_seen_in_the_first_call(recomputes, around, seen):
    layer = Layer(recomputes)
    found = watch.LayerWatch([layer])
    around(layer, torch.ones(16, 1, 8, requires_grad=True)).sum().backward()
    assert found.recomputed(CPU) == seen
    assert not layer._forward_pre_hooks
    assert not layer.self_attention.core_attention._forward_pre_hooks


def test_a_schedule_that_never_calls_a_layer_shows_nothing_and_keeps_no_hook():
    layer = Layer(recomputes=False)
    found = watch.LayerWatch([layer])
    layer.self_attention.core_attention(torch.ones(16, 1, 8))
    assert found.recomputed(CPU) == {}
    found.stop()
    assert not any(module._forward_pre_hooks for module in layer.modules())  # else no CUDA graph can be captured


def test_experts_are_seen_in_the_first_layer_that_has_some_and_are_no_mlp():
    dense, moe = Layer(recomputes=False), Layer(recomputes=False)
    dense.mlp, moe.mlp = Attention(), torch.nn.Module()
    moe.mlp.router = Attention()
    found = watch.LayerWatch([dense, moe, Layer(recomputes=True)])
    x = torch.ones(16, 1, 8, requires_grad=True)
    dense.mlp(dense(hidden_states=x))
    checkpoint(moe.mlp.router, moe(hidden_states=x), use_reentrant=True)
    assert found.recomputed(CPU) == {"recompute": "selective", "recompute_modules": ("moe",)}


@pytest.mark.parametrize(("tokens", "split"), [(16, True), (32, False)])
def test_the_tokens_between_layers_show_whether_ranks_split_them(tensor_ranks, tokens, split):
    layer = Layer(recomputes=False)
    found = watch.LayerWatch([layer])
    assert found.sequence_parallel(32) is None
    layer((torch.ones(tokens, 1, 8), torch.ones(tokens, 1, 8))[0])
    assert found.sequence_parallel(32) is split


# How a run in fp8 scaled, from modules that look like Transformer Engine's: the package itself needs a GPU.


class DelayedScaling:
    fp8_dpa = fp8_mha = False


class TEDelayedScaling(DelayedScaling):
    """As in megatron.core.extensions.transformer_engine."""


class Float8CurrentScaling:
    fp8_dpa = True
    fp8_mha = False


class Linear:
    def __init__(self, recipe, fp8=True):
        self.fp8, self.fp8_meta = fp8, {} if recipe is None else {"recipe": recipe}


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        ([object(), Linear(None)], (None, None)),
        ([Linear(DelayedScaling(), fp8=False)], (None, None)),
        ([Linear(None), Linear(TEDelayedScaling())], ("delayed", None)),
        ([Linear(Float8CurrentScaling())], ("current", "fp8")),
    ],
)
def test_the_recipe_of_the_modules_that_multiplied_in_fp8_tells(modules, found):
    assert scaling_and_attention(modules) == found
