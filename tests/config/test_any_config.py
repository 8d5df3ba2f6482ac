"""Properties of every configuration: a valid one survives YAML, and a wrong value is a ConfigError with its file and line."""

import copy
import re
import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tprimat.config import schema
from tprimat.config.load import DEFAULT_FILE, read_config
from tprimat.core.errors import ConfigError
from tprimat.core.models import model_shape

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="$\0"), max_size=12)
"""Without variables of the environment."""
NAMES = st.text("abcdefghij-_.0123456789 ", min_size=1, max_size=8).filter(lambda name: not name.startswith("."))
VARIABLES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,7}", fullmatch=True)
COUNTS = st.integers(1, 10_000_000)
WHOLE = st.integers(0, 10_000_000)
POSITIVE = st.floats(1e-12, 1e12)
FRACTIONS = st.floats(0, 1, exclude_max=True)
FLAGS = st.booleans()
AUTO_FLAGS = st.one_of(FLAGS, st.just("auto"))
PLATFORMS = st.sampled_from(["nvidia", "amd", "cpu"])
SCALARS = st.one_of(st.none(), FLAGS, st.integers(-9, 9), st.floats(-1e9, 1e9), TEXT)


def maybe(strategy, other=None):
    return st.one_of(st.just(other), strategy)


LAYOUTS = st.builds(
    schema.LayoutConfig,
    tensor_model_parallel_size=COUNTS,
    virtual_pipeline_model_parallel_size=maybe(COUNTS),
    sequence_parallel=AUTO_FLAGS,
    micro_batch_size=maybe(COUNTS),
)
MODELS = st.builds(
    schema.ModelConfig,
    name=TEXT,
    architecture=st.one_of(NAMES, st.sampled_from([model_shape("llama-3.1-8b"), model_shape("deepseek-v3")])),
    nemo_recipe=maybe(TEXT),
)
TRAINING = st.builds(
    schema.TrainingConfig,
    data=st.builds(
        schema.DataConfig, dataset=TEXT, tokenizer=maybe(TEXT), micro_batch_size=maybe(COUNTS, "auto"), sequence_length=COUNTS
    ),
    optimizer=st.builds(
        schema.OptimizerConfig,
        learning_rate=POSITIVE,
        min_learning_rate=st.just(0.0),
        warmup_steps=WHOLE,
        schedule=st.sampled_from(["cosine", "linear", "constant"]),
        beta1=FRACTIONS,
        epsilon=POSITIVE,
    ),
    duration=st.builds(schema.DurationConfig, max_steps=COUNTS),
)
OPTIMIZATIONS = st.builds(
    schema.PlatformOptimizations,
    precision=st.sampled_from(["bf16", "fp8", "fp32"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    engine_options=st.builds(schema.EngineOptions, compiled_regions=AUTO_FLAGS, balanced_stages=FLAGS),
    environment=st.dictionaries(VARIABLES, TEXT, max_size=3),
    primus=st.builds(
        schema.PrimusOptions,
        image=maybe(TEXT),
        slurm_arguments=st.lists(TEXT, max_size=3).map(tuple),
        overrides=st.dictionaries(NAMES, SCALARS, max_size=3),
    ),
)
CONFIGS = st.builds(
    schema.Config,
    experiment=st.builds(schema.ExperimentConfig, name=TEXT, description=TEXT, seed=WHOLE),
    hardware=st.builds(
        schema.HardwareConfig,
        platforms=st.dictionaries(
            PLATFORMS, st.builds(schema.PlatformHardware, gpus_per_node=maybe(st.integers(1, 4096), "auto"))
        ),
    ),
    models=st.dictionaries(NAMES, MODELS, max_size=2),
    training=TRAINING,
    parallelism=st.dictionaries(NAMES, st.dictionaries(NAMES, st.dictionaries(PLATFORMS, LAYOUTS), max_size=2), max_size=2),
    platform_optimizations=st.dictionaries(PLATFORMS, OPTIMIZATIONS, max_size=2),
    benchmarking=st.builds(
        schema.BenchmarkingConfig,
        warmup_steps=maybe(WHOLE, "auto"),
        run_timeout_seconds=maybe(st.floats(1e-9, 1e9)),
        cloud_costs=st.dictionaries(NAMES, POSITIVE, max_size=2),
    ),
)
ADAPTER = TypeAdapter(schema.Config)
SHIPPED = yaml.safe_load(DEFAULT_FILE.read_text(encoding="utf8"))


def loaded(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.yaml"
        path.write_text(text, encoding="utf8")
        return read_config(path, environment={}).config


def complaint(text):
    """The error as the command line prints it; None for a valid configuration. Other exceptions pass."""
    try:
        loaded(text)
    except ConfigError as error:
        return str(error)
    return None


@given(CONFIGS)
@settings(max_examples=40, deadline=None)
def test_a_valid_configuration_survives_yaml(config):
    assert loaded(yaml.safe_dump(ADAPTER.dump_python(config, mode="json"))) == config


def paths(values, path=()):
    """The key paths of everything below the top level."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths(value, (*path, key))


JUNK = st.recursive(
    st.one_of(st.none(), FLAGS, st.integers(-(1 << 70), 1 << 70), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=4,
)


@given(st.sampled_from(list(paths(SHIPPED))), JUNK)
@settings(max_examples=100, deadline=None)
def test_any_value_in_any_place_is_taken_or_refused_with_file_and_line(path, value):
    values = copy.deepcopy(SHIPPED)  # YAML's aliases are shared objects
    here = values
    for key in path[:-1]:
        here[key] = copy.deepcopy(here[key])
        here = here[key]
    here[path[-1]] = value
    text = complaint(yaml.safe_dump(values, sort_keys=False))
    assert text is None or re.search(r"^  at    \S*my\.yaml:\d+ ", text, re.MULTILINE), text


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_configuration_or_a_config_error(text):
    answer = complaint(text)
    assert answer is None or "my.yaml" in answer


WORDS = st.lists(
    st.sampled_from(["models", ": ", "\n", "  ", "&a ", "*a", "<<: ", "[", "]", "{", "}", ", ", "- ", "${A}", "'", "1"])
)


@given(WORDS)
@settings(max_examples=100, deadline=None)
def test_any_mixture_of_yaml_signs_is_a_configuration_or_a_config_error(words):
    answer = complaint("".join(words))
    assert answer is None or "my.yaml" in answer
