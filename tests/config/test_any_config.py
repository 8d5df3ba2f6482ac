"""Properties of every configuration: a valid one survives YAML, and a wrong value is a ConfigError with its file and line."""

import copy
import re
import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tprimat.config.load import DEFAULT_FILE, read_config
from tprimat.core.errors import ConfigError

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="$\0"), max_size=12)
"""Without variables of the environment."""
FLAGS = st.booleans()


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
@settings(max_examples=60, deadline=None)
def test_any_value_in_any_place_is_taken_or_refused_with_file_and_line(path, value):
    values = copy.deepcopy(SHIPPED)  # YAML's aliases are shared objects
    here = values
    for key in path[:-1]:
        here[key] = copy.deepcopy(here[key])
        here = here[key]
    here[path[-1]] = value
    text = complaint(yaml.dump(values, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False))
    assert text is None or re.search(r"^  at    \S*my\.yaml:\d+ ", text, re.MULTILINE), text


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_is_a_configuration_or_a_config_error(text):
    answer = complaint(text)
    assert answer is None or "my.yaml" in answer


WORDS = st.lists(
    st.sampled_from(["models", ": ", "\n", "  ", "&a ", "*a", "<<: ", "[", "]", "{", "}", ", ", "- ", "${A}", "'", "1"])
)


@given(WORDS)
@settings(max_examples=60, deadline=None)
def test_any_mixture_of_yaml_signs_is_a_configuration_or_a_config_error(words):
    answer = complaint("".join(words))
    assert answer is None or "my.yaml" in answer
