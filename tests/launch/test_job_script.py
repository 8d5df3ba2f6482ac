"""The script for sbatch: a shell starts exactly the words that were asked for, whatever they are."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tprimat.cli.run import add_arguments, run_request
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.launch.slurm import Job, script
from tprimat.runner.grid import at_largest
from tprimat.runner.request import RunRequest, words_of
from tprimat.runner.submit import explicit, shown

ECHO = """\
import json, sys
print(json.dumps(sys.argv[1:]))
"""


def a_job(**fields):
    given = {"name": "n", "directory": Path("/d"), "log": "/d/l", "nodes": 2, "gpus_per_node": 8, "command": ("srun", "x")}
    return Job(**{**given, **fields})


def test_the_shell_starts_the_words_themselves(tmp_path):
    words, folder = ["", " ", "$HOME `id` \\", "'\"", "*", "é\n\t", "#!", "-e", "%j"], tmp_path
    (folder / "echo.py").write_text(ECHO)
    (folder / "job.sh").write_text(script(a_job(command=(sys.executable, str(folder / "echo.py"), *words))))
    done = subprocess.run(["bash", str(folder / "job.sh")], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == words


def test_an_option_of_sbatch_cannot_bring_lines_of_its_own():
    with pytest.raises(LaunchError, match="is not an option of sbatch"):
        script(a_job(options=("--comment=a\n#SBATCH --wrap=evil",)))
    with pytest.raises(ConfigError, match="control characters"):
        explicit(RunRequest(platform="nvidia", settings=('cluster.slurm.partition="a\\nb"',)), ())


REQUESTS = [
    {},
    {"model": "llama", "strategy": "balanced,truly_identical", "runs": 3, "gpus": 4, "nodes": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "cp": 1, "engine": "megatron", "platform": "nvidia", "size": "full"},
    {"steps": "5", "warmup": "2", "micro_batch_size": "2", "global_batch_size": "64", "sequence_length": "128"},
    {"precision": "fp8", "data": "text:/a b", "seed": "7", "settings": ("a.b=c d", "e=['f']"), "config": Path("/c.yaml")},
    {"output": Path("/out put"), "probes": (Path("/p"), Path("/q")), "force": True},
]


@pytest.mark.parametrize("fields", REQUESTS, ids=map(str, range(len(REQUESTS))))
def test_the_flags_of_a_request_make_the_same_request(fields, monkeypatch):
    request = RunRequest(**fields)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    monkeypatch.setattr(sys, "argv", ["benchmark.py"])
    again = run_request(parser.parse_args(words_of(request)))
    assert {name: getattr(again, name) for name in fields} == fields
    assert words_of(again) == words_of(request)


def test_the_script_names_what_another_machine_would_decide_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLEL", "balanced")
    text = shown(RunRequest(model="llama", platform="nvidia", nodes=2, gpus=4, output=tmp_path), ())
    for words in (
        "--parallel balanced",
        "--platform nvidia",
        "--set size=full",
        "--nodes 2",
        "--resume",
        f"--output-dir {tmp_path}",
    ):
        assert words in text
    assert "#SBATCH --gpus-per-node=4\n#SBATCH --requeue\n#SBATCH --exclusive\n" in text
    assert not list(tmp_path.iterdir()), "nothing is written to show it"


def test_a_scaling_series_is_planned_for_its_largest_number_and_passed_on_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = at_largest(RunRequest(platform="nvidia", model="llama", strategy="minimal_communication"), "2,4")
    text = shown(request, ["--scaling", "2,4"])
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert " --scaling 2,4" in text
    assert "--gpus " not in text
    with pytest.raises(ConfigError, match="--gpus and --scaling exclude each other"):
        at_largest(request, "2,4")


def test_a_login_node_must_say_for_which_machines_it_submits():
    with pytest.raises(ConfigError, match="no --platform says which GPUs the job gets"):
        shown(RunRequest(model="llama"), ())


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("{image: 'nvcr.io/x:1'}", "--cpu-bind=none --container-image=nvcr.io/x:1 --container-mounts="),
        ("{image: /i.sif, runtime: apptainer, mounts: ['/data:/data']}", "apptainer exec --nv --bind "),
    ],
)
def test_a_container_sees_the_folders_of_a_run(tmp_path, container, words):
    settings = (f"cluster.slurm.container={container}",)
    text = shown(RunRequest(model="llama", platform="nvidia", output=tmp_path / "out", settings=settings), ())
    assert words in text
    assert f"{tmp_path}/out:{tmp_path}/out" in text
    assert " python3 " in text
    assert ("/data:/data" in text) == ("mounts" in container)
