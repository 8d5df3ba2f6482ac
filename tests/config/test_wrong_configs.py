"""Every mistake in a configuration is answered with what, where, why and the way out."""

from pathlib import Path

import pytest
import yaml
from a_config import TEXT, complaint, written

from tprimat.config.load import parse_setting

CASES = yaml.safe_load((Path(__file__).parent / "wrong_configs.yaml").read_text())


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: case["new"].strip().replace("\n", " ") or f"without {case['old'].strip()}"
)
def test_a_wrong_configuration_says_word_for_word(case, tmp_path):
    assert case["old"] in TEXT
    text = complaint(written(tmp_path, TEXT.replace(case["old"], case["new"], 1)))
    assert text.replace(f"{tmp_path}/", "") == case["says"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "training.data.sequence_length=long",
            """\
training.data.sequence_length is 'long'.
  at    --set training.data.sequence_length
  why   It must be a whole number.""",
        ),
        (
            "cluster.slurm.account=0123",
            """\
cluster.slurm.account is 83.
  at    --set cluster.slurm.account
  why   It must be text.
  try   account: "...", in quotes; after --set, in two kinds of quotes""",
        ),
        (
            "training.speed=3",
            """\
speed is not a key of training.
  at    --set training.speed
  try   one of: routing, moe_expert_capacity_factor, data, optimizer, duration""",
        ),
        (
            "models.mine.name.first=Mine",
            """\
models.mine.name is a value and has no keys below it.
  at    --set models.mine.name.first""",
        ),
        (
            "parallelism.split.mine.cpu.tensor_model_parallel_size=8",
            """\
num_attention_heads (4) must be a multiple of tensor_model_parallel_size (8).
  at    --set parallelism.split.mine.cpu.tensor_model_parallel_size
  why   m has 4 attention heads, 2 key/value heads and a feed-forward width of 128; each rank needs whole heads of both and \
an equal share of the width.
  try   tensor_model_parallel_size: 1 or 2""",
        ),
        (
            "training.duration.max_steps=2026-13-45",
            """\
training.duration.max_steps is '2026-13-45'.
  at    --set training.duration.max_steps
  why   It must be a whole number.""",
        ),
    ],
)
def test_a_wrong_setting_names_the_flag(setting, says, tmp_path):
    assert complaint(written(tmp_path), settings=[parse_setting(setting)]) == says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "my.yaml holds no configuration.\n  at    my.yaml\n  why   Its top level must be keys with values."),
        ("- a\n", "my.yaml holds no configuration.\n  at    my.yaml\n  why   Its top level must be keys with values."),
        (
            "a: \x01\n",
            "my.yaml is not valid YAML.\n  at    my.yaml\n"
            "  why   unacceptable character #x0001: special characters are not allowed",
        ),
        ("a: " + 40_000 * "[", "my.yaml is nested too deeply, or contains itself.\n  at    my.yaml"),
        ("a: 1\n---\nb: 1\n", "my.yaml is not valid YAML.\n  at    my.yaml:2\n  why   but found another document"),
        (
            "models: {}\nparallelism: {}\n",
            "There is no model 'mine' in models.\n  at    my.yaml:1 models\n  try   add mine: ...",
        ),
        (
            "training: {}\n",
            "models is missing.\n  at    my.yaml models\n  why   It has no default.\n  try   add models: ...",
        ),
    ],
)
def test_a_file_that_is_no_configuration_says_so(text, says, tmp_path):
    assert complaint(written(tmp_path, text)).replace(f"{tmp_path}/", "") == says


def test_a_file_that_is_not_text_or_not_there_says_so(tmp_path):
    path = tmp_path / "my.yaml"
    fix = f"  at    {path}\n  try   --config FILE names another one"
    assert complaint(path) == f"{path} cannot be read: No such file or directory.\n{fix}"
    path.write_bytes(b"\xff\xfe\xfa")
    assert complaint(path) == f"{path} cannot be read: it is not UTF-8 text.\n{fix}"


@pytest.mark.parametrize("text", ["a.b", "=3", " =3"])
def test_a_setting_without_key_or_value_is_shown_how(text, tmp_path):
    from tprimat.core.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        parse_setting(text)
    assert str(caught.value) == (f"--set {text} is not KEY=VALUE.\n  at    --set\n  try   --set training.duration.max_steps=30")
