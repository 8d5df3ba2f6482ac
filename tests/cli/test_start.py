"""Every way into the program, from any folder and with any Python first on PATH."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, SCRIPTS

WAYS_IN = sorted({*SCRIPTS, "pretrain_llama.py", "pretrain_qwen.py"})
READ_BY_AN_OLD_PYTHON = ("tprimat/__init__.py", "tprimat/__main__.py", "tprimat/cli/__init__.py", "tprimat/cli/start.py")


def bare_environment(folder):
    """The folder of programs of a new environment without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    return bare_environment(tmp_path_factory.mktemp("bare"))


@pytest.fixture
def checkout(tmp_path):
    """A checkout without an environment."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in (*WAYS_IN, "Makefile"):
        shutil.copy(ROOT / name, folder)
    (folder / "tprimat").symlink_to(ROOT / "tprimat")
    return folder


def start(bare_python, command, folder, **environment):
    path = f"{bare_python}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", WAYS_IN)
def test_a_script_finds_the_environment_of_its_checkout(bare_python, checkout, tmp_path, script):
    (checkout / ".venv").symlink_to(sys.prefix)
    done = start(bare_python, [checkout / script, "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script} ")


def test_the_package_finds_it_too_and_keeps_the_words_of_the_user(bare_python, checkout):
    (checkout / ".venv").symlink_to(sys.prefix)
    done = start(bare_python, ["python3", "-m", "tprimat", "compare", "--results-dir", "no such folder"], checkout)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no such folder" in done.stderr


@pytest.mark.parametrize("script", WAYS_IN)
def test_without_an_environment_one_line_says_what_to_type(bare_python, checkout, tmp_path, script):
    done = start(bare_python, [checkout / script, "--help"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {bare_python}/python3 lacks ")
    assert line.endswith(f"try: make -C '{checkout}' install")


@pytest.mark.parametrize("path", [*READ_BY_AN_OLD_PYTHON, *(name for name in WAYS_IN if name.endswith(".py"))])
def test_an_old_python_can_read_the_way_in(path):
    ast.parse((ROOT / path).read_text(encoding="utf8"), feature_version=(3, 6))


def test_an_old_python_is_named(checkout):
    program = "import sys; sys.version_info = (3, 8, 18); from tprimat.cli.start import script; sys.exit(script('compare'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {sys.executable} is ")
    assert "needs 3.10 or newer" in done.stderr


@pytest.mark.slow
def test_a_wheel_installs_the_package_alone_and_it_works_in_any_folder(tmp_path):
    bare_python = bare_environment(tmp_path / "bare")
    source, folder = tmp_path / "source", tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copytree(ROOT / "tprimat", source / "tprimat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE", "benchmark.py", "utils.py", "config.yaml"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    python = bare_python / "python3"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (installed,) = bare_python.parent.glob("lib/python3*/site-packages")
    assert {path.name.split("-")[0] for path in installed.iterdir()} <= {"tprimat", "__pycache__"}
    bare = start(bare_python, ["tprimat", "validate"], folder)
    assert "-m pip install" in bare.stderr
    packages = Path(ast.__file__).parent if sys.prefix == sys.base_prefix else Path(pytest.__file__).parent.parent
    done = start(bare_python, ["tprimat", "validate", "--gpus", "8"], folder, PYTHONPATH=str(packages))
    assert done.returncode in {0, 1}, done.stderr
    assert "minimal_communication" in done.stdout
