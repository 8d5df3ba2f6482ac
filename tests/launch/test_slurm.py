"""Runs on a real SLURM cluster of two nodes (tests/slurm_cluster.py), with a fake trainer for the ranks."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from a_launch import ROOT, wait_for

from tprimat.launch.agreement import LOST_SECONDS
from tprimat.records.store import RunDirectory

sys.path.insert(0, str(ROOT / "tests"))
from slurm_cluster import Cluster, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
NODE = str(Path(__file__).parent / "a_node.py")
FLAGS = ("--gpus", 1, "--platform", "cpu", "--model", "llama", "--steps", 4)
ASK_SECONDS = 0.3
"""Between questions that start processes of SLURM, or read records."""
LONG = ("pace", 0.02, "steps", 2, "sleep", 900)
"""Until it is stopped: on a busy machine, a test takes minutes."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    one = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        one.up()
        yield one
    finally:
        one.down()


@pytest.fixture
def launcher(tmp_path):
    """The command line of a launcher; the trainers of both nodes do the same."""

    def words(*trainer, flags=()):
        environment = f"FAKE_WORDS={json.dumps([str(word) for word in trainer])}"
        return ["env", environment, sys.executable, NODE, *FLAGS, "--output-dir", tmp_path / "out", *flags]

    return words


@pytest.fixture
def submit(cluster, tmp_path):
    """Submit a job that runs a command, and return its number."""

    def start(command, *options, srun=True):
        script = tmp_path / "job.sh"
        words = shlex.join(map(str, [*(["srun"] if srun else []), *command]))
        script.write_text(f"#!/bin/sh\nexec {words}\n")
        output = (
            f"--output={tmp_path}/job-%a.txt"
            if any("--array" in option for option in options)
            else f"--output={tmp_path}/job.txt"
        )
        done = cluster.enter(0, "sbatch", "--parsable", "--open-mode=append", output, "--nodes=2", *options, script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return start


@pytest.fixture
def ended(cluster):
    """Wait for the end of a job, and return its state."""

    def wait(job, seconds=120.0):
        def state():
            return cluster.enter(0, "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").stdout.split()

        going = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SIGNALING"}
        wait_for(lambda: not going & set(state()), seconds, ASK_SECONDS)
        cluster.wait_idle()
        return state()[0]

    return wait


def records(folder):
    return [RunDirectory(path.parent).read_run() for path in sorted(folder.glob("**/runs/*/run.json"))]


def is_training(folder):
    return lambda: list(folder.glob("out/**/runs/*/steps.jsonl")) and list(folder.glob("out/**/runs/*/node-1/training.log"))


def test_srun_on_two_nodes_is_one_run_as_it_is_also_where_a_node_has_a_disk_of_its_own(cluster, launcher, tmp_path):
    (tmp_path / "out").mkdir()
    cluster.enter(1, "mount", "-t", "tmpfs", "tmpfs", tmp_path / "out", check=True)
    try:
        done = cluster.enter(0, "srun", "--nodes=2", "--label", *launcher("pace", 0.02, "steps", 4))
        assert done.returncode == 0, done.stdout + done.stderr
        (record,) = records(tmp_path)
        assert (record.outcome, [node.host for node in record.nodes]) == ("completed", list(cluster.nodes))
        assert "· 2 processes on 2 nodes (" in done.stdout
        assert f"1: node 1 of 2 follows {cluster.nodes[0]}" in done.stderr
        assert not list(tmp_path.glob("out/runs/*/node-1"))
        there = cluster.enter(1, "find", tmp_path / "out", "-name", "plan.json").stdout
        assert f"{record.run_id}/node-1/plan.json" in there, "the plan came through the connection"
    finally:
        cluster.enter(1, "umount", tmp_path / "out")


def test_a_job_that_forgets_srun_and_one_that_starts_every_rank_are_refused_at_once(cluster, launcher, submit, ended, tmp_path):
    assert ended(submit(launcher(flags=["--nodes", 2]), srun=False)) == "FAILED"
    text = (tmp_path / "job.txt").read_text()
    assert "srun did not start this: it runs on one node of the 2 in the job" in text
    assert ended(submit(launcher(flags=[]), srun=False)) == "FAILED"
    text = (tmp_path / "job.txt").read_text()
    assert "srun did not start this: it would run on one node of the 2 in the job." in text
    assert "srun --nodes=2 --ntasks=2 ./benchmark.py, or --nodes 1 for this node alone" in text
    shell = ["srun", "--interactive", "--nodes=1", "--ntasks=1", *launcher()]  # as in the shell of salloc
    assert ended(submit(shell, srun=False)) == "FAILED"
    assert (tmp_path / "job.txt").read_text().count("it would run on one node of the 2 in the job.") == 2
    done = cluster.enter(0, "srun", "--nodes=2", "--ntasks=3", *launcher())
    assert "srun started 3 tasks on 2 nodes" in done.stderr
    assert not records(tmp_path)


def test_the_warning_before_a_time_limit_ends_the_run_as_such_and_a_sweep_repeats_it(cluster, launcher, submit, ended, tmp_path):
    one_cell = ["--sweep", "micro_batch_size=1"]
    job = submit(launcher(*LONG, flags=one_cell), "--time=5")
    wait_for(is_training(tmp_path))
    cluster.enter(0, "scancel", "--signal=USR1", job)
    ended(job)
    (record,) = records(tmp_path)
    assert record.outcome == "timed_out"
    assert record.cause.startswith("The scheduler's time limit: SIGUSR1 came")
    done = cluster.enter(0, "srun", "--nodes=2", *launcher("pace", 0.02, "steps", 4, flags=one_cell))
    assert done.returncode == 0, done.stderr
    assert [record.outcome for record in records(tmp_path)] == ["timed_out", "completed"]


def test_a_requeued_job_makes_what_is_missing(cluster, launcher, submit, ended, tmp_path):
    first = tmp_path / "first"
    words = ("pace", 0.02, "steps", 4, "await", first, 1)
    job = submit(launcher(*words, flags=["--resume"]), "--requeue")
    wait_for(is_training(tmp_path))
    cluster.enter(0, "scontrol", "requeue", job, check=True)
    wait_for(lambda: [record.outcome for record in records(tmp_path)] == ["interrupted"], pause=ASK_SECONDS)
    first.write_text("\n")

    def begins_again():  # not in two minutes, as SLURM would have it
        cluster.enter(0, "scontrol", "update", f"jobid={job}", "starttime=now")
        return len(records(tmp_path)) == 2

    def what_happened():
        job_now = cluster.enter(0, "scontrol", "show", "job", job).stdout
        return f"no second run: {job_now}\n{(tmp_path / 'job.txt').read_text()}"

    wait_for(begins_again, pause=ASK_SECONDS, explain=what_happened)
    assert ended(job) == "COMPLETED"
    assert [record.outcome for record in records(tmp_path)] == ["interrupted", "completed"]


# --launcher slurm: the launcher submits and waits.


@pytest.fixture
def submits(cluster, launcher, tmp_path):
    """Run ./benchmark.py --launcher slurm on the first node; its job starts the fake trainer on both."""

    def start(*trainer, flags=()):
        flags = ["--launcher", "slurm", "--nodes", 2, "--set", "cluster.slurm.exclusive=false", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = cluster.words(0, *launcher(*trainer, flags=flags))
        return subprocess.Popen(list(map(str, words)), cwd=tmp_path, env=cluster.environment, **pipes)

    return start


def number_of(folder):
    return next(iter(folder.glob("out/slurm-*.log"))).stem.removeprefix("slurm-")


def test_a_submitted_job_is_waited_for_and_its_record_names_it(submits, cluster, tmp_path):
    process = submits("pace", 0.02, "steps", 4)
    text = process.communicate(timeout=150)[0]
    job = number_of(tmp_path)
    assert (process.returncode, f"Submitted batch job {job}" in text) == (0, True), text
    assert "llama step 4/4" in (tmp_path / "out" / f"slurm-{job}.log").read_text()
    (record,) = records(tmp_path)
    assert (record.outcome, record.job, len(record.nodes)) == ("completed", f"slurm {job}", 2)
    assert "#SBATCH --nodes=2\n" in (tmp_path / "out" / "slurm.sh").read_text()


def test_a_second_job_for_a_folder_is_warned_of_and_fails(submits, cluster, tmp_path):
    process = submits("ignore", "SIGTERM", *LONG)
    assert any("Submitted batch job" in line for line in iter(process.stdout.readline, ""))
    wait_for(is_training(tmp_path))
    (running,) = records(tmp_path)
    second = submits("steps", 2)
    text = second.communicate(timeout=150)[0]
    assert (second.returncode, "the new job fails if that still runs when it starts" in text) == (1, True), text
    cluster.enter(0, "scancel", running.job.removeprefix("slurm "))
    process.communicate(timeout=150)
    assert process.returncode == 1
    assert [(record.outcome, record.cause) for record in records(tmp_path)] == [("interrupted", "Stopped by SIGTERM.")]
    cluster.wait_idle()


def test_a_cable_that_is_pulled_is_noticed_within_a_minute(cluster, launcher, submit, ended, tmp_path):
    job = submit(launcher(*LONG))
    wait_for(is_training(tmp_path))
    cluster.cable(1, "down")
    try:
        wait_for(lambda: records(tmp_path)[0].outcome != "running", 60, ASK_SECONDS)
    finally:
        cluster.cable(1, "up")
    assert LOST_SECONDS < 30, "what a_node.py shortens"
    (record,) = records(tmp_path)
    assert record.cause == f"Node 1 ({cluster.nodes[1]}) was lost: no sign of it for 3 s."
    cluster.enter(0, "scancel", job)
    ended(job)
