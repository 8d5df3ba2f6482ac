"""Every mistake in a configuration is answered with what, where, why and the way out."""

from pathlib import Path

import pytest
import yaml
from a_config import TEXT, complaint, written

from tprimat.config.load import parse_setting

CASES = yaml.safe_load((Path(__file__).parent / "wrong_configs.yaml").read_text())


def name_of(case):
    """What is wrong in it."""
    return case.get("set") or repr(case.get("text")) * ("text" in case) or case["new"].strip() or f"without {case['old'].strip()}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_wrong_configuration_says_word_for_word(case, tmp_path):
    """A file in which one thing is replaced, a file of its own, or a setting of the command line."""
    old = case.get("old", "")
    assert old in TEXT
    path = written(tmp_path, case.get("text", TEXT.replace(old, case.get("new", ""), 1)))
    text = complaint(path, settings=[parse_setting(case["set"])] if "set" in case else [])
    assert text.replace(f"{tmp_path}/", "") == case["says"]


def test_a_file_that_is_nested_deeper_than_libyaml_can_parse_says_so(tmp_path):
    path = written(tmp_path, "a: " + 1_100 * "[")
    assert complaint(path) == f"{path} is nested too deeply, or contains itself.\n  at    {path}"


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
