"""The script for sbatch: a shell starts exactly the words that were asked for, whatever they are."""

import json
import subprocess
import sys

import pytest
from commands import run_command

from tprimat.core.errors import ConfigError, LaunchError
from tprimat.runner.request import RunRequest
from tprimat.runner.submit import job_of, script

ECHO = """\
import json, sys
print(json.dumps(sys.argv[1:]))
"""


def test_the_shell_starts_the_words_themselves(tmp_path):
    words, folder = ["", " ", "$HOME `id` \\", "'\"", "*", "é\n\t", "#!", "-e", "%j"], tmp_path
    (folder / "echo.py").write_text(ECHO)
    (folder / "job.sh").write_text(script([], [sys.executable, str(folder / "echo.py"), *words]))
    done = subprocess.run(["bash", str(folder / "job.sh")], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == words


def test_an_option_of_sbatch_cannot_bring_lines_of_its_own():
    with pytest.raises(LaunchError, match="is not an option of sbatch"):
        script(["--comment=a\n#SBATCH --wrap=evil"], [])
    with pytest.raises(ConfigError, match="control characters"):
        job_of(RunRequest(platform="nvidia", settings=('cluster.slurm.partition="a\\nb"',)), ())


def shown(*flags, **environment):
    done = run_command("benchmark.py", "--launcher", "slurm", *flags, "--dry-run", environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_makes_the_same_call_and_names_what_another_machine_would_decide_otherwise(tmp_path):
    flags = ("--model", "llama", "--platform", "nvidia", "--nodes", "2", "--gpus", "4", "--output-dir", tmp_path)
    text = shown(*flags, PARALLEL="balanced")
    for words in ("--parallel balanced", "--platform nvidia", "--set size=full", "--nodes 2", f"--output-dir {tmp_path} "):
        assert words in text
    assert text.endswith(" --resume\n")
    assert "--launcher" not in text
    assert "--dry-run" not in text
    assert "#SBATCH --gpus-per-node=4\n#SBATCH --requeue\n#SBATCH --exclusive\n" in text
    assert not list(tmp_path.iterdir()), "nothing is written to show it"


def test_a_login_node_must_say_for_which_machines_it_submits():
    with pytest.raises(ConfigError, match="--platform must say which GPUs the job gets"):
        job_of(RunRequest(model="llama"), ())
