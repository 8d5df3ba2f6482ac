"""Entry point of every command: find a Python that has the packages, then run the command in it.

This file must import under Python 3.6 to 3.9: a user with such a Python first on PATH gets one line instead of a traceback.
"""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

OLDEST = (3, 10)
MODULES = ("jinja2", "matplotlib", "megatron", "numpy", "plotly", "pydantic", "scipy", "torch", "yaml")
"""Without which some command does not work. Lightning, which has two names, comes with the others."""
ALWAYS = {"numpy", "pydantic", "scipy", "yaml"}
"""Without which no command works."""
ROOT = Path(__file__).absolute().parent.parent.parent
ENVIRONMENT = ROOT / ".venv"
"""Made by `make install`; absent where the package is installed elsewhere."""


def script(name: str = "", prog: str = "", words: "list[str] | None" = None) -> int:
    """Run `tprimat`, or one command under a script's name, as a whole process. Returns the exit status."""
    find_environment()
    from tprimat.cli.console import run_as_script
    from tprimat.cli.main import main, start

    return run_as_script((lambda: start(name, prog, words, suggest=True)) if name else main)


def pretrain(model: str) -> int:
    """Run pretrain_{model}.py: one rank of a plan under torchrun (`--plan PATH`), else the benchmark of one model."""
    words = sys.argv[1:]
    if "--plan" not in words:
        return script("run", f"pretrain_{model}.py", ["--model", model, *words])
    find_environment()
    from tprimat.train.worker import main as train

    return train(words)


def find_environment() -> None:
    """Continue in the checkout's .venv, in place of this process, if this Python is too old or lacks a package."""
    old = sys.version_info < OLDEST
    missing = [name for name in MODULES if find_spec(name) is None]
    python = str(ENVIRONMENT / "bin" / "python")
    inside = sys.flags.no_site or Path(sys.prefix).resolve() == ENVIRONMENT.resolve()
    if (old or missing) and not inside and os.access(python, os.X_OK):
        os.execv(python, [python, *sys.argv])
    if old or not ALWAYS.isdisjoint(missing):
        why = f"is {sys.version.split()[0]}, and TPrimat needs 3.10 or newer" if old else f"lacks {', '.join(missing)}"
        make = f"make -C {shlex.quote(str(ROOT))} install"
        pip = f"{sys.executable} -m pip install tprimat"
        sys.stderr.write(f"error: {sys.executable} {why}; try: {make if (ROOT / 'Makefile').is_file() else pip}\n")
        raise SystemExit(2)
