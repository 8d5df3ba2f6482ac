"""Private names of torch, Megatron-Core and Lightning are used in three files alone, which notice when one changes."""

import ast
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tprimat.core.errors import LaunchError
from tprimat.engines import megatron
from tprimat.megatron import compat
from tprimat.train.compat import KNOWN_VERSIONS

PACKAGE = Path(compat.__file__).parents[1]
PACKAGES = ("megatron", "nemo", "train")
ANY_ENGINE = {PACKAGE / "train" / "worker.py", PACKAGE / "train" / "compat.py"}
"""These do without a name that torch or Lightning does not have."""
COMPAT = {PACKAGE / "megatron" / "compat.py", *ANY_ENGINE}
FILES = [file for name in PACKAGES for file in sorted((PACKAGE / name).rglob("*.py")) if file not in COMPAT]


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def own_names(tree):
    """Names that a file defines: functions, classes, methods, fields, and what it assigns to attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def private_uses(source):
    """Private names in a source that are not its own: attributes, imports, and modules imported by a string."""
    tree = ast.parse(source)
    own = own_names(tree)
    private = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            stored_elsewhere = isinstance(node.ctx, ast.Store) and not of_self
            if node.attr not in own or stored_elsewhere:
                private.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            private += [part for module in modules for part in module.split(".") if is_private(part)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            first, *parts = node.value.split(".")
            if first in {"torch", "megatron", "lightning", "pytorch_lightning", "nemo"}:
                private += [part for part in parts if is_private(part)]
    return private


def test_every_known_version_has_been_tried():
    """0.16.1 by `make test`, 0.19.2 by `make test-core19`, 0.15.3 by `make test-nemo`: goldens/losses are those of all."""
    assert metadata.version("megatron-core") in KNOWN_VERSIONS["megatron-core"]


@pytest.mark.parametrize(("installed", "age"), [("0.20.0rc1", "new"), ("1.0", "new"), ("0.19.5", None), ("0.14.1", "old")])
def test_a_newer_or_older_version_is_refused_with_the_known_ones(monkeypatch, installed, age):
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    error = megatron.ENGINE.untried()
    assert (error is None) is (age is None)
    if error:
        assert error.what == f"megatron-core {installed} is too {age}."
        assert "0.18.2 and 0.19.2" in error.why
        assert "--force starts it anyway" in error.fix


def test_no_other_file_touches_a_private_name():
    uses = {str(file.relative_to(PACKAGE)): private_uses(file.read_text(encoding="utf8")) for file in FILES}
    assert not {file: names for file, names in uses.items() if names}


def test_the_check_finds_each_kind_of_use():
    for line in (
        "torch._foreach_mul_(tensors, 2)",
        "from torch._dynamo import config",
        "import_module('torch._dynamo.utils')",
        "from megatron.core.tensor_parallel.random import _set_cuda_rng_state",
        "class Strategy(DDPStrategy):\n    def setup(self):\n        self._get_process_group_backend()",
    ):
        assert private_uses(line)


def test_a_name_that_is_gone_is_reported_with_package_version_and_the_known_versions():
    with pytest.raises(LaunchError) as raised:
        compat.require("torch", torch, "_foreach_teleport")
    assert raised.value.what == f"torch {metadata.version('torch')} lacks a name: torch._foreach_teleport."
    assert "2.11.0 and 2.13.0" in raised.value.why
    assert raised.value.fix == "pip install torch==2.13.0"


def test_a_function_whose_parameters_changed_is_reported():
    owner = SimpleNamespace(__name__="owner", step=lambda self, closure: None)
    assert compat.require("megatron-core", owner, "step", ("self",)) is owner.step
    with pytest.raises(LaunchError, match=r"has a function with other parameters: owner\.step"):
        compat.require("megatron-core", owner, "step", ("self", "optimizer"))
