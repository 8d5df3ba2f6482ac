"""Words on the command line that no flag can mean: one message, exit 2, nothing written."""

import os

import pytest
from commands import run_command

RUN = ("--dry-run", "--platform", "cpu", "--model", "llama")


@pytest.mark.parametrize(
    ("program", "words", "says"),
    [
        ("benchmark.py", (*RUN, "--output-dir", ""), "--output-dir is empty."),
        ("benchmark.py", (*RUN, "--output-dir="), "--output-dir is empty."),
        ("compare.py", ("--results-dir", ""), "--results-dir is empty."),
        ("report", ("",), "the command line is empty."),
        ("benchmark.py", (*RUN, "--output-dir", "~nosuch/x"), "~nosuch/x is not a path here."),
        ("benchmark.py", (*RUN, "--set", "data=text:~nosuch/x"), "~nosuch/x is not a path here."),
        ("benchmark.py", (*RUN, "--output-dir", "x" * 5000), f"{'x' * 100} is not a path here."),
        ("benchmark.py", (*RUN, "--output-dir", os.fsdecode(b"\xff")), "\\xff is not UTF-8 text."),
        ("compare.py", ("--results-dir", os.fsdecode(b"\xff")), "\\xff is not UTF-8 text."),
        ("benchmark.py", (*RUN, "--runs", "1001"), "--runs is '1001'."),
        ("benchmark.py", (*RUN, "--runs", "9" * 4000), "--runs is '9999999999"),
        ("benchmark.py", (*RUN, "--gpus", "1000000000"), "--gpus"),
        ("benchmark.py", (*RUN, "--set", "seed=1" + "0" * 400), "experiment.seed is 1000"),
        ("benchmark.py", (*RUN, "--global-batch-size", "1" + "0" * 20), "global_batch_size is 100000000000000000000."),
        ("benchmark.py", (*RUN, "--parallel", "../x"), "There is no strategy '../x'"),
        ("benchmark.py", (*RUN, "--parallel", ","), "--parallel names no strategy."),
        ("benchmark.py", ("--dry-run", "--platform", "cpu", "--model", ",,"), "--model is ',,'."),
        ("benchmark.py", (*RUN, "--set", "training.optimizer.learning_rate=true"), "learning_rate is true."),
        ("extract_primus_metrics.py", ("--log-file", "x.log", "--model-name", ".."), "'..' is not a name."),
    ],
)
def test_a_word_without_a_meaning_is_refused_at_once(program, words, says, tmp_path):
    done = run_command(program, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "\n  at    " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_variable_names_itself(tmp_path):
    done = run_command("benchmark.py", *RUN, cwd=tmp_path, environment={"OUTPUT_DIR": "~nosuch/x"})
    assert done.returncode == 2
    assert "at    the variable OUTPUT_DIR" in done.stderr


def test_a_log_that_is_a_pipe_without_a_writer_is_empty(tmp_path):
    os.mkfifo(tmp_path / "log")
    done = run_command("extract_primus_metrics.py", "--log-file", tmp_path / "log", "--model-name", "llama", cwd=tmp_path)
    assert done.returncode == 2
    assert "holds no training step" in done.stderr
