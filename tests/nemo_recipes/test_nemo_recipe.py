"""Plans become the real recipes of an installed NeMo, field by field. Nothing is trained here."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from changes import replace
from needs_nemo import ROOT, needs_nemo
from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.core.errors import LaunchError
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


def recipe_of(plan, *, on_gpu=True, transformer_engine=True, accumulates=True):
    from tprimat.nemo.recipe import Environment, build_recipe

    here = Environment(on_gpu=on_gpu, transformer_engine=transformer_engine, accumulates_weight_gradients=accumulates)
    return build_recipe(plan, here)


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


@pytest.mark.parametrize(
    ("schedule", "first", "last"), [("cosine", 1e-4, 4.03e-5), ("linear", 1e-4, 6.375e-5), ("constant", 1e-4, 3e-4)]
)
def test_each_schedule_warms_up_and_then_follows_its_curve(schedule, first, last):
    import fiddle
    import torch

    plan = plan_of(
        "llama",
        training__optimizer__schedule=schedule,
        training__optimizer__warmup_steps=2,
        training__duration__max_steps=10,
    )
    weights = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    made = fiddle.build(recipe_of(plan).optim.lr_scheduler).scheduler(None, weights)["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(10):
        rates.append(weights.param_groups[0]["lr"])
        weights.step()
        made.step()
    assert rates[0] == pytest.approx(first)
    assert rates[-1] == pytest.approx(last, rel=0.05)
    assert max(rates) == pytest.approx(3e-4)


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


def test_recompute_reaches_the_model():
    own = "platform_optimizations__nvidia__recompute"
    for settings, wanted in (
        ({own: "none"}, (None, None, None)),
        ({own: "selective"}, ("selective", None, None)),
        ({own: "full"}, ("full", "uniform", 1)),
        ({own: "full", f"{own}_layers": 5}, ("full", "block", 5)),
    ):
        made = recipe_of(plan_of("llama", **settings)).model.config.__arguments__
        assert tuple(made.get(f"recompute_{name}") for name in ("granularity", "method", "num_layers")) == wanted


def test_the_layers_that_the_recipe_leaves_in_bf16_are_the_ones_that_megatron_multiplies_so():
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    from tprimat.nemo.evidence import layers_in_bf16

    names = ("fp8", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    plugin = recipe_of(plan_of("llama", **fp8_options("fp8", "current"))).trainer.plugins
    config = SimpleNamespace(num_layers=32, **{name: getattr(plugin, name) for name in names})
    layers = [SimpleNamespace(layer_number=number) for number in range(1, 33)]
    stage = SimpleNamespace(config=config, decoder=SimpleNamespace(layers=layers[16:]))
    wanted = [layer for layer in layers[16:] if is_first_last_bf16_layer(config, layer.layer_number - 1)]
    assert layers_in_bf16([stage]) == wanted == [layers[31]]
    all_in_fp8 = fp8_options("fp8", "current") | {"platform_optimizations__nvidia__nemo__first_last_layers_bf16": False}
    config.first_last_layers_bf16 = recipe_of(plan_of("llama", **all_in_fp8)).trainer.plugins.first_last_layers_bf16
    assert layers_in_bf16([stage]) == []


def test_mock_data_is_nemo_s_and_text_is_ours_with_a_tokenizer_of_the_model_s_size():
    import fiddle
    from nemo.collections.llm.gpt.data.mock import MockDataModule

    from tprimat.nemo.recipe import SeededMockData, SequencesModule

    for model, size in (("llama", 128256), ("qwen", 152064)):
        plan = plan_of(model)
        mock = fiddle.build(recipe_of(plan).data)
        text = fiddle.build(recipe_of(replace(plan, dataset="text:stdlib")).data)
        assert (type(mock), type(text)) == (SeededMockData, SequencesModule)
        assert isinstance(mock, MockDataModule)
        assert mock.tokenizer.vocab_size == text.tokenizer.vocab_size == size


def test_the_seed_of_the_plan_is_the_seed_of_mock_data():
    import fiddle
    import torch

    def first_sequences(seed, count=3):
        data = fiddle.build(recipe_of(plan_of("llama", experiment__seed=seed)).data)
        data.setup()
        return torch.stack([data._train_ds[index]["tokens"] for index in range(count)])

    assert recipe_of(plan_of("qwen", experiment__seed=7)).data.seed == 7
    one, again, other = first_sequences(7), first_sequences(7), first_sequences(8)
    assert torch.equal(one, again)
    assert not any(torch.equal(left, right) for left in one for right in other)


def test_nemo_s_module_still_gives_its_datasets_no_seed_so_that_ours_is_needed():
    from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
    from nemo.collections.llm.gpt.data.mock import MockDataModule

    data = MockDataModule(tokenizer=NullTokenizer(vocab_size=511))
    data.setup()
    assert data._train_ds.seed in {0, 1}


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        ("qwen3_8b", "qk_layernorm is True"),
        ("mixtral_8x7b", "num_moe_experts is 8"),
        ("gemma2_2b", "layernorm_zero_centered_gamma is True"),
        ("starcoder2_7b", "normalization is LayerNorm"),
        ("gpt3_175b", "normalization is LayerNorm"),
    ],
)
def test_a_recipe_of_another_kind_of_model_is_refused(recipe, field):
    plan = replace(plan_of("qwen"), nemo_recipe=recipe)
    with pytest.raises(LaunchError) as caught:
        recipe_of(plan)
    assert caught.value.what == f"NeMo's recipe {recipe} builds another kind of model than qwen-2.5-7b: {field}."


def test_every_llama_and_qwen_recipe_that_a_shape_can_name_is_of_the_kind_that_is_set():
    for recipe in ("llama3_8b", "llama2_7b", "qwen2_7b", "qwen25_14b", "qwen2_1p5b"):
        assert recipe_of(replace(plan_of("qwen"), nemo_recipe=recipe)) is not None
    for recipe in ("llama31_8b", "llama31_70b", "llama32_1b", "llama32_3b"):
        assert recipe_of(replace(plan_of("llama"), nemo_recipe=recipe)) is not None


def test_weight_gradients_go_into_the_fp32_buffer_where_products_can_add_to_it():
    for engine, accumulates, fused in ((True, True, True), (True, False, False), (False, True, False)):
        config = recipe_of(plan_of("llama"), transformer_engine=engine, accumulates=accumulates).model.config
        assert config.gradient_accumulation_fusion is fused


def test_without_transformer_engine_the_model_is_built_from_torch():
    from tprimat.nemo.recipe import TorchBlockSpec, forward_step

    config = recipe_of(plan_of("llama"), transformer_engine=False).model.config
    off = ("apply_rope_fusion", "persist_layer_norm", "masked_softmax_fusion", "gradient_accumulation_fusion")
    assert [getattr(config, name) for name in off] == [False] * 4
    assert isinstance(config.transformer_layer_spec, TorchBlockSpec)
    assert config.forward_step_fn is forward_step
    own = recipe_of(plan_of("llama")).model.config
    assert "transformer_layer_spec" not in own.__arguments__


TUNED = {
    "cross_entropy_fusion_impl": "te",
    "grad_reduce_in_fp32": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "tp_comm_overlap": True,
    "cuda_graph_impl": "local",
}


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_the_options_of_the_tuned_recipes_reach_the_recipe(model):
    import fiddle

    recipe = recipe_of(plan_of(model, **{f"platform_optimizations__nvidia__nemo__{key}": value for key, value in TUNED.items()}))
    config, strategy = recipe.model.config, recipe.trainer.strategy
    assert (config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl) == (True, "te")
    assert (config.cuda_graph_impl, config.use_te_rng_tracker, strategy.use_te_rng_tracker) == ("local", True, True)
    replicas = fiddle.build(strategy.ddp)
    assert (replicas.overlap_grad_reduce, replicas.overlap_param_gather, replicas.check_for_nan_in_grad) == (True, True, True)
    assert recipe.optim.config.overlap_param_gather is True
    assert recipe.trainer.plugins.grad_reduce_in_fp32 is False
    (overlap,) = [one for one in recipe.trainer.callbacks if "Overlap" in type(fiddle.build(one)).__name__]
    wanted = fiddle.build(overlap).user_comm_overlap_cfg
    assert (wanted.tp_comm_overlap, wanted.overlap_grad_reduce, wanted.overlap_param_gather) == (True, True, True)


def test_cuda_graphs_survive_the_second_construction_of_the_configuration():
    """NeMo's strategy calls __post_init__ again when it connects the model, as in every training."""
    import fiddle
    from nemo.lightning._strategy_lib import set_model_parallel_attributes

    recipe = recipe_of(plan_of("llama", platform_optimizations__nvidia__nemo__cuda_graph_impl="local"))
    recipe.model.config.apply_rope_fusion = False  # a kernel of Transformer Engine's
    model, strategy = fiddle.build(recipe.model), fiddle.build(recipe.trainer.strategy)
    config = set_model_parallel_attributes(model, strategy.parallelism)
    assert (config.cuda_graph_impl, config.cuda_graph_scope, config.use_te_rng_tracker) == ("local", "full", True)


def test_only_layers_that_hold_a_captured_graph_count_as_run_in_one():
    from tprimat.nemo.evidence import graphs_of

    def model(*graphs):
        layers = [SimpleNamespace(cudagraph_manager=SimpleNamespace(cudagraph_runners=runners)) for runners in graphs]
        return [SimpleNamespace(decoder=SimpleNamespace(layers=layers))]

    captured, recorded = [SimpleNamespace(fwd_graph=object())], [SimpleNamespace(fwd_graph=None)]
    assert graphs_of(model(captured, captured), stepped=True) == "local"
    assert graphs_of(model([], []), stepped=False) == "local"
    assert graphs_of(model([], []), stepped=True) == graphs_of(model(captured, recorded), stepped=True) == "none"
    plain = [SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace()]))]
    assert graphs_of(plain, stepped=False) == "none"


def test_an_option_that_nemo_turns_off_with_a_warning_is_a_mismatch():
    from tprimat.nemo.run import ignored_options

    plan = plan_of("llama", platform_optimizations__nvidia__nemo__tp_comm_overlap=True)
    running = {**TUNED, "tp_comm_overlap": False}
    assert ignored_options(plan, running) == ("tp_comm_overlap: True was asked for, False ran",)
    assert ignored_options(plan, TUNED) == ignored_options(plan_of("llama"), running) == ()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (
            {"platform_optimizations__nvidia__nemo__cross_entropy_fusion_impl": "te"},
            "cross_entropy_fusion_impl is te, and Transformer Engine is not installed here",
        ),
        ({"platform_optimizations__nvidia__precision": "fp8"}, "NeMo cannot train in fp8 here"),
        (
            {"parallelism__balanced__llama__nvidia__context_parallel_size": 2},
            "NeMo cannot split a sequence over 2 ranks here",
        ),
    ],
)
def test_without_transformer_engine_fp8_and_context_parallelism_are_refused(settings, what):
    plan = plan_of("llama", **settings)
    assert recipe_of(plan) is not None
    with pytest.raises(LaunchError, match=what):
        recipe_of(plan, transformer_engine=False)


def test_a_recipe_that_nemo_does_not_have_is_named():
    plan = replace(plan_of("llama"), nemo_recipe="llama31_99b")
    with pytest.raises(LaunchError, match="NeMo has no recipe llama31_99b"):
        recipe_of(plan)


def test_a_half_installed_nemo_is_told_by_the_module_that_is_missing():
    module = "datasets"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_MODULE, module], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert f"NeMo's recipe llama31_8b cannot be imported: No module named '{module}'" in done.stdout, done.stderr[-2000:]
    assert "make nemo" in done.stdout


WITHOUT_A_MODULE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from tprimat.core.errors import LaunchError
from tprimat.nemo.availability import pretrain_recipe

try:
    pretrain_recipe("llama31_8b", "llama")
except LaunchError as error:
    print(error)
"""
