"""Plans become the real recipes of an installed NeMo, field by field. Nothing is trained here."""

import pytest
from needs_nemo import needs_nemo
from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.plan.build import build_plan

pytestmark = needs_nemo

STRATEGIES = ("truly_identical", "memory_optimized", "balanced")
MODELS = ("llama", "qwen", "qwen3_moe", "mixtral")
WORKLOAD = {  # of these tests, whatever config.yaml says
    "training__data__global_batch_size": 128,
    "training__data__sequence_length": 2048,
    "training__duration__max_steps": 50,
    "training__optimizer__learning_rate": 3e-4,
    "training__optimizer__min_learning_rate": 3e-5,
    "training__optimizer__warmup_steps": 10,
    "training__optimizer__schedule": "cosine",
}


def plan_of(model, strategy="balanced", size="full", **settings):
    overlay = [Setting(tuple(key.split("__")), value, "test") for key, value in {**WORKLOAD, **settings}.items()]
    request = request_of(model, strategy, size=size, engine="nemo")
    return build_plan(read_config(size=size, settings=overlay, environment={}), request)


def recipe_of(plan):
    from tprimat.nemo.recipe import build_recipe

    return build_recipe(plan)


def own_recipe(plan):
    """What NeMo itself makes of the model, untouched."""
    from nemo.collections import llm

    return getattr(llm, plan.nemo_recipe).pretrain_recipe(name="own", num_nodes=1, num_gpus_per_node=8)


@pytest.mark.parametrize(("model", "strategy"), [*zip(MODELS, STRATEGIES, strict=False), ("mixtral", "balanced")])
def test_a_strategy_is_what_the_recipe_runs(model, strategy):
    plan = plan_of(model, strategy)
    recipe = recipe_of(plan)
    made, layout, batch = recipe.trainer.strategy, plan.workload.layout, plan.workload
    assert made.tensor_model_parallel_size == layout.tensor
    assert made.pipeline_model_parallel_size == layout.pipeline
    assert made.virtual_pipeline_model_parallel_size is None
    assert made.context_parallel_size == 1
    assert made.expert_model_parallel_size == layout.expert
    assert made.sequence_parallel is (layout.tensor > 1)
    assert (made.pipeline_dtype is not None) is (layout.pipeline > 1)
    assert (recipe.trainer.devices, recipe.trainer.num_nodes) == (8, 1)
    assert (recipe.data.micro_batch_size, recipe.data.global_batch_size) == (batch.micro_batch_sequences, 128)
    assert recipe.data.seq_length == recipe.model.config.seq_length == 2048
    assert recipe.trainer.max_steps == recipe.optim.lr_scheduler.max_steps == 50


@pytest.mark.parametrize("model", MODELS)
def test_the_recipe_keeps_its_own_overlap_and_its_own_model(model):
    plan = plan_of(model, "minimal_communication")
    own, made = own_recipe(plan), recipe_of(plan)
    changed = {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "pipeline_dtype",
    }
    kept = {name: value for name, value in own.trainer.strategy.__arguments__.items() if name not in changed}
    assert {name: getattr(made.trainer.strategy, name) for name in kept} == kept
    if model != "mixtral":  # whose own recipe does not say that gradients are summed in fp32
        assert made.trainer.plugins == own.trainer.plugins
    assert [type(callback) for callback in made.trainer.callbacks] == [type(callback) for callback in own.trainer.callbacks or []]


@pytest.mark.parametrize("model", MODELS)
def test_our_shape_of_a_model_is_the_one_that_nemo_builds(model):
    import fiddle

    from tprimat.nemo.recipe import model_fields

    plan = plan_of(model)
    own = own_recipe(plan).model.config
    own.apply_rope_fusion = own.moe_permute_fusion = False  # cannot be built otherwise where Transformer Engine is absent
    config = fiddle.build(own)
    expected = model_fields(plan.workload.shape)
    if config.vocab_size is None:  # taken from the tokenizer there
        expected.pop("vocab_size")
    if config.kv_channels is None:
        config.kv_channels = config.hidden_size // config.num_attention_heads
    assert {name: getattr(config, name) for name in expected} == expected


def test_optimizer_and_schedule_are_the_plan_s():
    recipe = recipe_of(plan_of("qwen", training__optimizer__gradient_clipping=0.5, training__optimizer__weight_decay=0.05))
    config, schedule = recipe.optim.config, recipe.optim.lr_scheduler
    assert (config.lr, config.min_lr, config.weight_decay, config.clip_grad) == (3e-4, 3e-5, 0.05, 0.5)
    assert (config.adam_beta1, config.adam_beta2, config.adam_eps) == (0.9, 0.95, 1e-8)
    assert config.use_distributed_optimizer is True
    assert (schedule.warmup_steps, schedule.constant_steps, schedule.min_lr) == (10, 0, 3e-5)


def fp8_options(precision, scaling):
    return {
        "platform_optimizations__nvidia__precision": precision,
        "platform_optimizations__nvidia__engine_options__fp8_scaling": scaling,
    }


@pytest.mark.parametrize(
    ("precision", "scaling", "recipe_name"),
    [("bf16", "delayed", None), ("fp8", "delayed", "delayed"), ("fp8", "current", "tensorwise")],
)
def test_the_precision_plugin_decides_on_fp8(precision, scaling, recipe_name):
    import fiddle

    options = fp8_options(precision, scaling)
    dtypes = fiddle.build(recipe_of(plan_of("llama", **options)).trainer.plugins).dtype_config
    assert dtypes.bf16 is True
    assert dtypes.fp8 == (None if recipe_name is None else "hybrid")
    assert recipe_name is None or dtypes.fp8_recipe == recipe_name


def test_the_loss_that_is_asked_for_and_a_tokenizer_of_the_model_s_size_reach_the_recipe():
    import fiddle

    for model, size in (("llama", 128256), ("qwen", 152064)):
        recipe = recipe_of(plan_of(model, platform_optimizations__nvidia__nemo__cross_entropy_fusion_impl="te"))
        assert (recipe.model.config.cross_entropy_loss_fusion, recipe.model.config.cross_entropy_fusion_impl) == (True, "te")
        assert fiddle.build(recipe.data).tokenizer.vocab_size == size
