"""Every example of every --help works on a CPU: runs as a dry run, the rest on recorded results."""

import re
import shutil
from pathlib import Path

from commands import SCRIPTS, run_command

from tprimat.cli.main import COMMANDS, parser_of

RUNS = Path(__file__).parents[1] / "runs"
EXAMPLE = re.compile(r"^ *(?:\./(\S+)|tprimat (\w+))((?: (?! )\S+)*)", re.MULTILINE)
TRIED_ELSEWHERE = (
    "--to wandb-offline",
    "probe",
    "scaling",
    "run_all_configs",
    "output/runs/RUN",
    "--fail-if-slower",
    "reproduce",
)
"""What needs a package, minutes, or results of its own: test_probe.py, test_scaling_command.py and others."""


def examples():
    for name in COMMANDS:
        for script, given, words in EXAMPLE.findall(parser_of(name, name).format_help()):
            program = script or given
            if program in {*SCRIPTS, *COMMANDS} and not any(part in f"{program}{words}" for part in TRIED_ELSEWHERE):
                yield (
                    program,
                    *words.replace('"NVIDIA H100 80GB HBM3"', "H100")
                    .replace('"H200 SXM"', "H200")
                    .replace('"H100 SXM"', "H100")
                    .split(),
                )


def test_every_example_of_the_help_works_on_a_cpu(tmp_path):
    for name in ("output", "h100", "mi300x", "before", "after"):
        shutil.copytree(RUNS / ("mi300x" if name in {"mi300x", "after"} else "h100"), tmp_path / name)
    shutil.copy(RUNS.parents[1] / "config.yaml", tmp_path)
    assert run_command("archive", "mi300x", "results.tar.gz", cwd=tmp_path).returncode == 0
    tried = set(examples())
    assert len(tried) > 25
    for program, *words in sorted(tried):
        dry = ["--dry-run"] if SCRIPTS.get(program) == "run" and "--dry-run" not in words else []
        done = run_command(program, *words, *dry, cwd=tmp_path)
        assert done.returncode == 0 or "they are copies" in done.stderr, (words, done.stderr)
