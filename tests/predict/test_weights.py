"""The weights of a rank, for every model of the table, are those of the model that Megatron-Core builds."""

import pytest
from changes import replace

from tprimat.core.flops import parameters
from tprimat.core.implementations import TRANSFORMER_ENGINE
from tprimat.core.models import models, padded_vocabulary
from tprimat.core.workload import FullWorkload, Layout
from tprimat.predict.stages import stages_of, weights_of

LAYERS = 4
"""Layers are equal, or of two kinds; more of them only take time."""
SPLIT = Layout(tensor=2, pipeline=2, data=2)


def workload(shape, layout=SPLIT):
    return FullWorkload.of(
        shape=shape, layout=layout, micro_batch=1, accumulation_steps=4, sequence_tokens=512, implementation=TRANSFORMER_ENGINE
    )


def predicted(shape, layout):
    work = workload(shape, layout)
    return [weights_of(work, stage).total for stage in stages_of(work)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name, shape in models().items() if not shape.attention_sinks))
def test_each_rank_holds_what_megatron_builds(name):
    from meta_models import weights_of_rank

    shape = models()[name]
    shape = replace(shape, layers=LAYERS, dense_first_layers=min(shape.dense_first_layers, LAYERS // 2))
    # Megatron's local layers split latent attention's first matrices, which Transformer Engine's keep whole.
    layout = replace(SPLIT, tensor=1) if shape.kv_lora_rank else SPLIT
    assert predicted(shape, layout) == [weights_of_rank(shape, layout, stage) for stage in range(layout.pipeline)]


@pytest.mark.parametrize("name", sorted(models()))
def test_one_rank_holds_the_whole_model(name):
    shape = models()[name]
    assert predicted(shape, Layout()) == [parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total]
