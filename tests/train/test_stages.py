"""How layers are shared out over pipeline stages."""

from dataclasses import replace

import pytest

from tprimat.core.models import model_shape
from tprimat.megatron.model import layers_of_last_stage


@pytest.mark.parametrize(
    ("model", "stages", "last"),
    [("llama-3.1-8b", 2, 15), ("llama-3.1-8b", 4, 5), ("qwen-2.5-7b", 2, 13), ("qwen-2.5-7b", 4, 4), ("llama-3.1-8b", 32, 1)],
)
def test_the_output_layer_counts_as_the_layers_that_it_weighs(model, stages, last):
    # Llama's output matrix is 2.4 layers' worth, Qwen's 2.3.
    assert layers_of_last_stage(model_shape(model), stages) == last


def test_a_small_vocabulary_moves_nothing():
    assert layers_of_last_stage(replace(model_shape("llama-3.1-8b"), vocabulary=1024), 2) == 16
