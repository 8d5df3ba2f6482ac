"""Reading a configuration: variables, settings, the tiny workload, and what a user may add."""

from dataclasses import replace

import pytest
import yaml
from a_config import TEXT, planned, written

from tprimat.config.load import DEFAULT_FILE, environment_choices, load_config, parse_setting, read_config
from tprimat.core.errors import ConfigError
from tprimat.core.models import ModelShape, model_shape
from tprimat.report.models import template
from tprimat.runner.request import RunRequest
from tprimat.runner.session import prepare

MODELS = ("llama", "qwen")


def test_the_configuration_of_the_project_has_five_strategies_for_each_model_on_three_platforms():
    config = load_config()
    assert list(config.parallelism) == [
        "maximum_performance",
        "truly_identical",
        "memory_optimized",
        "minimal_communication",
        "balanced",
    ]
    for strategy in config.parallelism.values():
        assert set(strategy) == set(config.models) == {*MODELS, "qwen3_moe", "mixtral"}
        assert all(set(platforms) == {"amd", "cpu", "nvidia"} for platforms in strategy.values())


@pytest.mark.parametrize(
    ("text", "environment", "value"),
    [
        ("'${SEQ:-32}'", {}, 32),
        ("'${SEQ:-32}'", {"SEQ": "16"}, 16),
        ("'${SEQ}'", {"SEQ": "16"}, 16),
        ("'${A:-1}${B:-28}'", {}, 128),
        ("'${A:-1}${B:-28}'", {"A": "6", "B": "4"}, 64),
    ],
)
def test_a_variable_of_the_environment_is_taken_or_its_default(text, environment, value, tmp_path):
    path = written(tmp_path, TEXT.replace("sequence_length: 64", f"sequence_length: {text}"))
    assert read_config(path, environment=environment).config.training.data.sequence_length == value


def test_the_last_setting_wins_over_the_file_and_over_the_tiny_workload(tmp_path):
    settings = [parse_setting(f"training.data.sequence_length={length}") for length in (8, 16)]
    for size in ("full", "tiny"):
        assert read_config(written(tmp_path), size=size, settings=settings).config.training.data.sequence_length == 16


def test_a_setting_may_make_keys_that_the_file_does_not_have(tmp_path):
    loaded = read_config(written(tmp_path), settings=[parse_setting("benchmarking.cloud_costs.NVIDIA H200=3.5")])
    assert loaded.config.benchmarking.cloud_costs == {"NVIDIA H200": 3.5}
    assert loaded.where("benchmarking", "cloud_costs", "NVIDIA H200") == "--set benchmarking.cloud_costs.NVIDIA H200"


MERGED = """\
parallelism:
  split:
    mine:
      nvidia: &tp2 {tensor_model_parallel_size: 2}
      amd: &pp2
        pipeline_model_parallel_size: 2
        micro_batch_size: 1
      cpu: LAYOUT
"""


@pytest.mark.parametrize(
    ("layout", "sizes", "lines"),
    [
        ("{<<: *tp2, micro_batch_size: 2}", (2, 1, 2), (15, 19, 19)),
        ("{micro_batch_size: 2, <<: *pp2}", (1, 2, 2), (19, 17, 19)),
        ("{<<: [*tp2, *pp2]}", (2, 2, 1), (15, 17, 18)),
        ("{<<: [{tensor_model_parallel_size: 4}, *tp2]}", (4, 1, None), (19, 19, 19)),
        ("{<<: {<<: *pp2, micro_batch_size: 4}, tensor_model_parallel_size: 2}", (2, 2, 4), (19, 17, 19)),
        ("{<<: []}", (1, 1, None), (19, 19, 19)),
    ],
)
def test_a_merge_key_takes_over_keys_with_their_lines(layout, sizes, lines, tmp_path):
    text = TEXT[: TEXT.index("parallelism:")] + MERGED.replace("LAYOUT", layout)
    loaded = read_config(path := written(tmp_path, text))
    merged = loaded.config.parallelism["split"]["mine"]["cpu"]
    keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
    assert tuple(getattr(merged, key) for key in keys) == sizes
    for key, line in zip(keys, lines, strict=True):
        assert loaded.where("parallelism", "split", "mine", "cpu", key).startswith(f"{path}:{line} ")
    assert loaded.config.parallelism["split"]["mine"]["amd"].micro_batch_size == 1


def test_the_tiny_workload_lies_under_what_a_configuration_changes(tmp_path):
    text = DEFAULT_FILE.read_text()
    changed = text.replace("max_steps: 50", "max_steps: 5").replace("global_batch_size: 128", "global_batch_size: 8")
    tiny = read_config(written(tmp_path, changed), size="tiny").config.training
    assert (tiny.duration.max_steps, tiny.data.global_batch_size, tiny.data.micro_batch_size) == (5, 8, 1)
    assert (tiny.data.sequence_length, tiny.optimizer.learning_rate) == (64, 3e-3)
    with pytest.raises(ConfigError, match="sequence_length is '2k'"):
        read_config(written(tmp_path, text.replace("sequence_length: 2048", "sequence_length: 2k")), size="tiny")


def test_a_model_of_the_table_or_of_the_file_alone_is_split_as_one_of_its_kind(tmp_path):
    text = DEFAULT_FILE.read_text().replace("models:\n", f"models:\n{template(model_shape('llama-3.2-1b'))}\n", 1)
    for model, degrees in (("mine", (4, 1)), ("llama-3.1-70b", (4, 1)), ("olmoe-1b-7b", (1, 8))):
        request = RunRequest(
            model=model, strategy="maximum_performance", platform="nvidia", dry_run=True, config=written(tmp_path, text)
        )
        (plan,) = prepare(request).plans
        assert (plan.workload.layout.tensor, plan.workload.layout.expert) == degrees
    assert template(model_shape("llama-3.2-1b")).count("tied_embeddings: true") == 1
    mine = yaml.safe_load(template(model_shape("mixtral-8x7b")))["mine"]["architecture"]
    assert replace(ModelShape(**mine), name="mixtral-8x7b", source=model_shape("mixtral-8x7b").source) == model_shape(
        "mixtral-8x7b"
    )


@pytest.mark.parametrize(
    ("strategy", "cores", "ranks"), [("balanced", 2, 2), ("balanced", 16, 8), ("memory_optimized", 2, 8), ("balanced", 1, 2)]
)
def test_a_cpu_starts_what_a_layout_needs_and_its_cores_allow(strategy, cores, ranks, monkeypatch):
    monkeypatch.setattr("tprimat.runner.session.cpu_cores", lambda: cores)
    request = RunRequest(model="llama", strategy=strategy, platform="cpu", dry_run=True)
    assert prepare(request).plans[0].gpus_per_node == ranks
    assert {plan.gpus_per_node for plan in prepare(replace(request, strategy="balanced,memory_optimized")).plans} == {8}


def test_the_environment_chooses_strategy_folder_and_logs_and_empty_is_unset():
    chosen = environment_choices({"PARALLEL": "balanced", "OUTPUT_DIR": "/o", "QWEN_LOG": "/q.log", "PRIMUS_PATH": "/p"})
    assert (chosen.strategy, chosen.output_directory, chosen.primus_path) == ("balanced", "/o", "/p")
    assert chosen.model_logs == {"qwen": "/q.log"}
    unset = environment_choices({"PARALLEL": "", "OUTPUT_DIR": "", "LLAMA_LOG": "", "PRIMUS_PATH": ""})
    assert (unset.strategy, unset.output_directory, unset.primus_path) == ("minimal_communication", "./output", None)
    assert unset.model_logs == {}


def test_a_model_spelled_out_in_the_file_is_planned_in_both_sizes(tmp_path):
    full, tiny = (planned(written(tmp_path), size=size) for size in ("full", "tiny"))
    whole, small = full.workload.shape, tiny.workload.shape
    assert (whole.layers, whole.hidden, whole.kv_heads, whole.gated) == (4, 64, 2, True)
    assert (small.layers, small.heads, small.kv_heads) == (4, 4, 2)
    assert full.workload.layout == tiny.workload.layout


def test_a_strategy_and_a_model_that_a_user_adds_work_without_touching_code(tmp_path):
    text = DEFAULT_FILE.read_text().replace("models:\n", "models:\n  small: {name: Small, architecture: llama-3-8b}\n", 1)
    text = text.replace("parallelism:\n", "parallelism:\n  my_own: {small: {nvidia: {pipeline_model_parallel_size: 4}}}\n", 1)
    plan = planned(written(tmp_path, text), model="small", strategy="my_own", platform="nvidia")
    assert (plan.workload.layout.tensor, plan.workload.layout.pipeline, plan.workload.layout.data) == (1, 4, 2)
    assert plan.workload.shape.name == "llama-3-8b"
