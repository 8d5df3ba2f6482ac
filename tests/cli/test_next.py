"""The line at the end of a command that names the next one: on a terminal only, and as the user would type it."""

import os
import pty
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from commands import ROOT, run_command

from tprimat.cli.main import COMMANDS, module_name, parser_of
from tprimat.cli.next import NEXT, suggestion

RUNS = ROOT / "tests" / "runs"
WORDS = {
    "compare": ["--results-dir", "a", "b c"],
    "peak": [],
    "scaling": ["one", "two"],
    "report": ["output"],
    "trace": ["t.json"],
    "extract": ["--log-file", "x", "--model-name", "llama"],
    "probe": ["gemm"],
    "archive": ["output", "x.tar.gz"],
}


def options_of(name, words):
    from importlib import import_module

    return parser_of(import_module(module_name(name)), name).parse_args(words)


@pytest.mark.parametrize("name", NEXT)
def test_every_suggestion_is_a_command_that_its_parser_accepts(name, tmp_path, monkeypatch):
    import shlex

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tprimat", name])
    (tmp_path / "output-00").mkdir()
    for status in (0, 1):
        line = suggestion(name, options_of(name, WORDS.get(name, [])), status, COMMANDS)
        if line is not None:
            start, following, *flags = shlex.split(line.removeprefix("next: ").partition("   ")[0])
            assert start == "tprimat"
            assert isinstance(options_of(following, flags), Namespace)


@pytest.mark.parametrize(
    ("program", "start"),
    [
        ("tprimat", "tprimat report"),
        ("./compare.py", "python3 -m tprimat report"),
        ("/a/tprimat/__main__.py", "python3 -m tprimat report"),
    ],
)
def test_it_is_spelled_as_the_user_started(program, start, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program])
    line = suggestion("compare", options_of("compare", WORDS["compare"]), 0, COMMANDS)
    assert line.startswith(f"next: {start} a 'b c'   write one HTML page")


def after(name, words, status=0):
    return suggestion(name, options_of(name, words), status, COMMANDS)


@pytest.mark.parametrize(("words", "more"), [([], "--resume"), (["--sweep", "tp=1,2"], "--resume"), (["--resume"], "")])
def test_an_interrupted_run_is_resumed_by_the_same_command(words, more, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["./benchmark.py", "--model", "llama", *words])
    line = after("run", ["--model", "llama", *words], status=130)
    assert line.partition("   ")[0] == " ".join(filter(None, ["next: ./benchmark.py --model llama", *words, more]))


def test_it_is_said_on_a_terminal_only(tmp_path):
    shutil.copytree(RUNS / "cpu", tmp_path / "output")
    assert "next:" not in run_command("compare.py", "--output", "compare.md", cwd=tmp_path).stderr
    leader, follower = pty.openpty()
    command = [sys.executable, str(ROOT / "compare.py"), "--output", "compare.md"]
    subprocess.run(command, cwd=tmp_path, stdin=follower, stdout=follower, stderr=follower, check=True, timeout=120)
    os.close(follower)
    said = os.read(leader, 65536).decode()
    os.close(leader)
    assert said.count("next: python3 -m tprimat report output") == 1
    assert Path(tmp_path, "compare.md").exists()
