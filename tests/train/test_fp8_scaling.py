"""How a run in fp8 scaled, from modules that look like Transformer Engine's: the package itself needs a GPU."""

import pytest

from tprimat.train.observed import scaling_and_attention


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
    ("modules", "told"),
    [
        ([object(), Linear(None)], (None, None)),
        ([Linear(DelayedScaling(), fp8=False)], (None, None)),
        ([Linear(None), Linear(TEDelayedScaling())], ("delayed", None)),
        ([Linear(Float8CurrentScaling())], ("current", "fp8")),
    ],
)
def test_the_recipe_of_the_modules_that_multiplied_in_fp8_tells(modules, told):
    assert scaling_and_attention(modules) == told
