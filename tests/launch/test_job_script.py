"""The script for sbatch: a shell starts exactly the words that were asked for, whatever they are."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from a_launch import ROOT, wait_for

from tprimat.cli.run import add_arguments, run_request
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.launch.slurm import Job, Task, script
from tprimat.runner.request import RunRequest, words_of
from tprimat.runner.scaling import at_largest
from tprimat.runner.submit import explicit, shown, state_line

ECHO = """\
import json, sys
print(json.dumps(sys.argv[1:]))
"""


def a_job(**fields):
    given = {"name": "n", "directory": Path("/d"), "log": "/d/l", "nodes": 2, "gpus_per_node": 8, "command": ("srun", "x")}
    return Job(**{**given, **fields})


@pytest.mark.parametrize("tasks", [[], [["--x", "$SLURM_JOB_ID"], ["a\n;;"]]])
def test_the_shell_starts_the_words_themselves(tmp_path, tasks):
    words, folder = ["", " ", "$HOME `id` \\", "'\"", "*", "é\n\t", "#!", "-e", "%j"], tmp_path
    (folder / "echo.py").write_text(ECHO)
    job = a_job(command=(sys.executable, str(folder / "echo.py"), *words), tasks=tuple(map(tuple, tasks)))
    (folder / "job.sh").write_text(script(job))
    for number in range(max(1, len(tasks))):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}
        done = subprocess.run(["bash", str(folder / "job.sh")], capture_output=True, text=True, env=environment, check=True)
        assert json.loads(done.stdout) == [*words, *(tasks[number] if tasks else [])]


def test_an_option_of_sbatch_cannot_bring_lines_of_its_own():
    with pytest.raises(LaunchError, match="is not an option of sbatch"):
        script(a_job(options=("--comment=a\n#SBATCH --wrap=evil",)))
    with pytest.raises(ConfigError, match="control characters"):
        explicit(RunRequest(platform="nvidia", settings=('cluster.slurm.partition="a\\nb"',)), ())


SUBMITS = """
from pathlib import Path
from tprimat.launch import slurm
from tprimat.launch.process import Interrupts
from tprimat.runner.submit import follow_job
job = slurm.Job(name="n", directory=Path("."), log="log", nodes=1, gpus_per_node=1, command=("x",))
with Interrupts():
    number = slurm.submit(Path("script"))
    print([task.state for task in follow_job(number, job, print)])
"""
TOOLS = {
    "sbatch": "touch sbatch-began; sleep 1; echo 42",
    "squeue": 'test -e ended && state=CANCELLED || state=RUNNING; echo "42|$state|None|node"',
    "scancel": "echo $1 > ended",
}


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_cancels_a_job_also_while_sbatch_runs(tmp_path):
    """A terminal interrupts all processes of its foreground group."""
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    following = subprocess.Popen(
        [sys.executable, "-c", SUBMITS],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for((tmp_path / "sbatch-began").exists)
    os.killpg(following.pid, signal.SIGINT)
    assert following.communicate(timeout=60)[0].endswith("['CANCELLED']\n")
    assert (tmp_path / "ended").read_text() == "42\n"


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
    request = at_largest(RunRequest(platform="nvidia", model="llama", strategy="minimal_communication"), [2, 4])
    text = shown(request, ["--scaling", "2,4"], "slurm")
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert " --scaling 2,4" in text
    assert "--gpus " not in text
    with pytest.raises(ConfigError, match="--gpus and --scaling exclude each other"):
        at_largest(request, [2, 4])


def test_a_job_that_never_starts_says_what_to_change():
    waits = Task(name="7", state="PENDING", reason="PartitionNodeLimit")
    assert state_line(waits) == "pending (PartitionNodeLimit), and stays so: fewer --nodes, or another cluster.slurm.partition"
    assert state_line(Task(name="7", state="PENDING", reason="Priority")) == "pending (Priority)"


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
