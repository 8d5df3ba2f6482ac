"""Entry point of every command: find a Python that has the packages, then run the command in it.

This file must import under Python 3.6 to 3.9: a user with such a Python first on PATH gets one line instead of a traceback.
"""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

OLDEST = (3, 10)
MODULES = {
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "megatron-core": "megatron",
    "numpy": "numpy",
    "plotly": "plotly",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "rich": "rich",
    "scipy": "scipy",
    "torch": "torch",
}
"""Package without which some command does not work -> its module. Lightning, which has two names, comes with the others."""
ALWAYS = ("numpy", "pydantic", "pyyaml", "scipy")
"""Packages without which no command works."""
ROOT = Path(__file__).absolute().parent.parent.parent
ENVIRONMENT = ROOT / ".venv"
"""Made by `make install`; absent where the package is installed elsewhere."""


def script(name: str = "", prog: str = "") -> int:
    """Run `tprimat`, or one command under a script's name, as a whole process. Returns the exit status."""
    problem = find_environment()
    if problem:
        return refuse(problem)
    from tprimat.cli.main import script as run

    return run(name or None, prog or None)


def pretrain(model: str) -> int:
    """Run pretrain_{model}.py: a benchmark, or one rank of it. Returns the exit status."""
    problem = find_environment()
    if problem:
        return refuse(problem)
    from tprimat.cli.run import pretrain as run

    return run(model)


def find_environment() -> str:
    """Continue in the checkout's .venv, in place of this process, if this Python is too old or lacks a package.

    Returns:
        why no command can run in this Python and what to type; empty if commands can run.
    """
    old = sys.version_info < OLDEST
    missing = [package for package, module in MODULES.items() if find_spec(module) is None]
    if not old and not missing:
        return ""
    python = ENVIRONMENT / "bin" / "python"
    if not sys.flags.no_site and os.access(str(python), os.X_OK) and Path(sys.prefix).resolve() != ENVIRONMENT.resolve():
        os.execv(str(python), [str(python), *own_words()])
    if sys.flags.no_site:
        return "Python was started with -S, which hides all packages; start it without"
    if old:
        return f"TPrimat needs Python 3.10 or newer, and {sys.executable} is {sys.version.split()[0]}; {install_words(missing)}"
    if set(ALWAYS).isdisjoint(missing):
        return ""
    return f"{sys.executable} lacks {', '.join(missing)}; {install_words(missing)}"


def own_words() -> "list[str]":
    """Return the words after the interpreter with which this process was started."""
    if sys.version_info >= OLDEST:
        return sys.orig_argv[1:]
    start = ["-m", "tprimat"] if Path(sys.argv[0]).name == "__main__.py" else [sys.argv[0]]
    return start + sys.argv[1:]


def install_words(missing: "list[str]") -> str:
    """Return what to type in order to get the packages."""
    if (ROOT / "Makefile").is_file():
        return f"try: make -C {shlex.quote(str(ROOT))} install"
    return f"try: {sys.executable} -m pip install {' '.join(missing) or 'tprimat'}"


def refuse(problem: str) -> int:
    """Print why no command can run. Returns the exit status."""
    sys.stderr.write(f"error: {problem}\n")
    return 2
