"""A run stores Python's bytecode where the image forbids it, but only in the user's cache, and leaves other choices alone."""

import os
import subprocess
import sys

from tprimat.engines.base import bytecode_cache


def imported(folder, environment):
    """Import a module as a process under this environment does; returns the bytecode that it left anywhere."""
    (folder / "source").mkdir()
    (folder / "source" / "some_module.py").write_text("value = 1\n")
    base = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([sys.executable, "-c", "import some_module"], cwd=folder / "source", env={**base, **environment}, check=True)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pyc") if "some_module" in path.name)


def test_bytecode_goes_to_the_users_cache_where_the_image_stores_none(tmp_path):
    image = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (found,) = imported(tmp_path, {**image, **bytecode_cache(image)})
    assert found.startswith("cache/tprimat/bytecode/")


def test_an_image_that_stores_bytecode_is_left_alone(tmp_path):
    assert bytecode_cache({}) == {}
    (found,) = imported(tmp_path, bytecode_cache({}))
    assert found.startswith("source/__pycache__/")


def test_a_prefix_that_the_user_chose_stays():
    assert bytecode_cache({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/somewhere"}) == {}
