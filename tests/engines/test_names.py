"""An engine answers for itself: only engines/ knows which engines there are, and what they differ in."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from plans import workload

from tprimat.core.errors import ConfigError
from tprimat.engines import AUTO, ENGINE_NAMES, bridge
from tprimat.engines.base import Here, choose, engine_named
from tprimat.plan.schema import plan_of

ROOT = Path(__file__).parents[2]
EXEMPT = ("tprimat/engines/", "tprimat/core/", "tprimat/logs/", "tprimat/records/legacy.py")
"""Besides the engines: published results, the names of log formats, and the words of other programs' files."""
SOURCES = sorted(path for folder in ("tprimat", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py"))


def strings_of(node, constants):
    """The strings that an operand stands for: its own, those of a literal container, and those of a constant of the module."""
    if isinstance(node, ast.Name):
        return strings_of(constants[node.id], {}) if node.id in constants else set()
    parts = [node, *getattr(node, "elts", []), *(getattr(node, "keys", []))]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def comparisons(source):
    """Lines that compare something with the name of an engine, or look one up by a table of such names."""
    if not any(name in source for name in ENGINE_NAMES):
        return []
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            strings = set().union(*(strings_of(operand, constants) for operand in (node.left, *node.comparators)))
        elif isinstance(node, ast.MatchValue):
            strings = strings_of(node.value, constants)
        elif isinstance(node, ast.Dict):
            strings = {key for key in strings_of(node, {}) if key in ENGINE_NAMES}
        else:
            continue
        lines += [node.lineno] if strings & set(ENGINE_NAMES) else []
    return lines


def test_nobody_outside_the_engines_compares_the_name_of_one():
    names = {str(path.relative_to(ROOT)): path for path in SOURCES}
    watched = {name: path for name, path in names.items() if not name.startswith(EXEMPT)}
    assert {name: lines for name, path in watched.items() if (lines := comparisons(path.read_text(encoding="utf8")))} == {}


def test_the_check_finds_comparisons_and_lets_other_uses_pass():
    for source in (
        'plan.engine == "nemo"',
        'engine in {"megatron", "nemo"}',
        'SLOW = ("primus",)\nprint(engine in SLOW)',
        'match engine:\n    case "torchtitan":\n        pass',
        'TRAINERS = {"nemo": "tprimat.nemo"}',
    ):
        assert comparisons(source)
    assert not comparisons('engine == "auto"; PlanRequest(engine="megatron"); {"--engine": "nemo"}')


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_every_engine_is_registered_under_its_own_name(name):
    engine = engine_named(name)
    assert engine.name == name
    assert engine.runs_worker is (engine.clock == "step_end")
    assert engine.trainer is None or find_spec(engine.trainer) is not None


def test_an_unknown_engine_is_refused_with_the_names_that_there_are():
    with pytest.raises(ConfigError) as caught:
        choose("deepspeed", Here(platform="cpu"))
    assert caught.value.fix == f"one of: {AUTO}, {', '.join(ENGINE_NAMES)}"


def test_auto_prefers_bridge_then_nemo_on_nvidia_and_primus_on_amd():
    preferred = {name: engine_named(name).automatic_on for name in ENGINE_NAMES if engine_named(name).automatic_on}
    assert list(preferred.items()) == [("bridge", "nvidia"), ("nemo", "nvidia"), ("primus", "amd")]


@pytest.mark.parametrize(("installed", "recipe"), [("0.5.0", "recipes.llama.llama3:"), ("0.6.2", "recipes.llama.h100.llama3:")])
def test_bridges_recipe_is_one_of_the_installed_version(monkeypatch, installed, recipe):
    monkeypatch.setattr(bridge, "package_version", lambda _: installed)
    assert bridge.recipe_name(plan_of(workload())).startswith(recipe)
