"""What a record starts from, and where evidence contradicts a plan."""

import json

import pytest
from changes import evidence as evidence_of
from changes import replace
from planning import make_plan

from tprimat.core.errors import ConfigError, RecordError
from tprimat.core.flops import parameters
from tprimat.core.models import padded_vocabulary
from tprimat.plan.schema import mismatches, read_plan, write_plan
from tprimat.runner.schedule import configuration
from tprimat.train import worker

SHAPED_OTHERWISE = [
    ({"tensor_parallel": 2}, "tensor parallel: 1 was asked for, 2 ran"),
    ({"matmul_dtype": "bf16"}, "matmul dtype: fp32 was asked for, bf16 ran"),
    ({"recompute": "full"}, "recompute: none was asked for, full ran"),
    ({"tokens_per_step": 77}, "tokens a step: 1024 was asked for, 77 ran"),
]


@pytest.fixture
def plan(tmp_path):
    return make_plan(tmp_path, "llama", {"hardware.platforms.cpu.gpus_per_node": 1})


@pytest.mark.parametrize(("ran", "finding"), SHAPED_OTHERWISE)
def test_what_ran_otherwise_is_a_mismatch(plan, ran, finding):
    assert mismatches(plan, evidence_of(source="running_framework", **ran)) == (finding,)


def test_what_was_not_said_is_no_mismatch(plan):
    assert mismatches(plan, evidence_of(source="running_framework")) == ()


def test_modules_are_recomputed_as_asked(plan):
    asked = replace(plan, recompute="selective", recompute_modules=("layernorm", "mlp"))
    ran = evidence_of(source="running_framework", recompute="selective", recompute_modules=("core_attn",))
    assert mismatches(asked, ran) == ("recomputed modules: layernorm, mlp was asked for, core_attn ran",)
    assert mismatches(asked, replace(ran, recompute_modules=("layernorm", "mlp"))) == ()
    assert mismatches(asked, replace(ran, recompute="none", recompute_modules=None)) == (
        "recompute: selective was asked for, none ran",
    )


@pytest.mark.parametrize(
    ("recompute", "modules", "what"),
    [
        ("none", ["mlp"], "recompute_modules is set, but recompute is none."),
        ("selective", ["mlp", "moe"], "recompute_modules has moe, but llama-3.1-8b-tiny has no experts."),
        ("selective", ["mla_up_proj"], "recompute_modules has mla_up_proj, but llama-3.1-8b-tiny has no latent attention."),
    ],
)
def test_modules_that_cannot_be_recomputed_are_refused(tmp_path, recompute, modules, what):
    settings = {"platform_optimizations.cpu.recompute": recompute, "platform_optimizations.cpu.recompute_modules": modules}
    with pytest.raises(ConfigError) as refused:
        make_plan(tmp_path, "llama", settings)
    assert (refused.value.what, bool(refused.value.fix)) == (what, True)


def test_layers_are_recomputed_as_asked(plan):
    asked = replace(plan, recompute="full", recompute_layers=2)
    ran = evidence_of(source="running_framework", recompute="full", recompute_layers=2)
    assert mismatches(asked, ran) == ()
    assert mismatches(asked, replace(ran, recompute_layers=None)) == ("recomputed layers: 2 was asked for, all ran",)
    assert mismatches(replace(asked, recompute_layers=None), ran) == ("recomputed layers: all was asked for, 2 ran",)


@pytest.mark.parametrize(
    ("recompute", "layers", "stages", "said"),
    [
        ("selective", 2, 1, ("It applies only to recompute: full.", "recompute: full")),
        ("full", 32, 1, ("A stage or its chunk has 32 layers.", "recompute_layers: 1 to 31, or null for all")),
        ("full", 16, 2, ("A stage or its chunk has 16 layers.", "recompute_layers: 1 to 15, or null for all")),
    ],
)
def test_a_number_of_layers_that_cannot_be_recomputed_is_refused(tmp_path, recompute, layers, stages, said):
    own = "platform_optimizations.cpu.recompute"
    settings = {own: recompute, f"{own}_layers": layers, "hardware.platforms.cpu.gpus_per_node": stages}
    settings["parallelism.minimal_communication.llama.cpu.pipeline_model_parallel_size"] = stages
    with pytest.raises(ConfigError) as refused:
        make_plan(tmp_path, "llama", settings)
    assert (refused.value.why, refused.value.fix) == said


def test_the_counted_parameters_must_be_those_of_the_shape_as_trained(plan):
    expected = parameters(replace(plan.workload.shape, vocabulary=padded_vocabulary(plan.workload.shape))).total
    assert mismatches(plan, evidence_of(source="running_framework", parameters=expected)) == ()
    (finding,) = mismatches(plan, evidence_of(source="running_framework", parameters=expected - 128))
    assert finding == f"parameters: {expected} was asked for, {expected - 128} ran"
    assert mismatches(plan, evidence_of(source="log", parameters=expected // 2)) == ()


def test_a_plan_of_another_version_is_refused(plan, tmp_path):
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    path.write_text(path.read_text().replace('"plan_version": 2', '"plan_version": 3'))
    with pytest.raises(Exception, match="not a valid RunPlan") as caught:
        read_plan(path)
    assert "plan_version" in str(caught.value)
    for text in ('{"nemo":' * 100_000, '{"steps": ' + "9" * 5000 + "}", '{"nemo": 3}', "[]"):
        path.write_text(text)
        with pytest.raises(RecordError):
            read_plan(path)


def test_a_plan_of_an_older_version_may_name_a_switch_that_is_gone(tmp_path, plan):
    path = tmp_path / "old" / "plan.json"
    write_plan(path, plan)
    text = path.read_text()
    assert '"load_ahead"' not in text
    path.write_text(text.replace('"engine_options": {', '"engine_options": {"load_ahead": "auto",'))
    assert read_plan(path) == plan
    path.write_text(text.replace('"nemo": {', '"nemo": {"enable_cuda_graph": null,'))
    assert read_plan(path) == plan
    path.write_text(text.replace('"run_id":', '"micro_batch_search": null, "run_id":', 1))
    assert read_plan(path) == plan
    path.write_text(text.replace('"engine_options": {', '"engine_options": {"load_behind": "auto",'))
    with pytest.raises(RecordError, match="not a valid RunPlan"):
        read_plan(path)


def test_a_plan_from_before_trainers_is_read_and_resumed_but_not_trained(plan, tmp_path):
    write_plan(tmp_path / "plan.json", plan)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document.pop("trainer") == "tprimat.megatron"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    older = read_plan(tmp_path / "plan.json")
    assert older == replace(plan, trainer=None)
    assert configuration(older) == configuration(plan)
    with pytest.raises(RecordError, match="names no trainer") as caught:
        worker.trainer_of(older)
    assert caught.value.fix


def test_a_plan_that_is_only_named_says_who_writes_it(tmp_path):
    with pytest.raises(RecordError, match=r"There is no .*plan\.json") as raised:
        read_plan(tmp_path / "plan.json")
    assert "--dry-run only names the place" in raised.value.fix
