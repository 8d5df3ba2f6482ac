"""Flags that every command has, what a mistyped one is answered with, and the flags that name what to run."""

import json
from typing import get_args

import pytest
from commands import run_command

from tprimat import __version__
from tprimat.cli.main import COMMANDS, main, parser_of
from tprimat.config import schema
from tprimat.config.options import COUNTING, OPTIONS
from tprimat.core.accelerators import PlatformName
from tprimat.core.flops import FlopConvention
from tprimat.core.workload import FORMATS
from tprimat.engines import ENGINE_NAMES


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("benchmark.py", ["--modle", "llama"], "there is no flag --modle; did you mean --model?"),
        ("benchmark.py", ["--micro=3"], "there is no flag --micro; did you mean --micro-batch-size?"),
        ("compare.py", ["--result-dir", "x"], "there is no flag --result-dir; did you mean --results-dir?"),
        ("compare.py", ["--warmup", "5"], "there is no flag --warmup here; instead: --set warmup=N"),
        ("benchmark.py", ["--measure", "3"], "--measure is gone; instead: --parallel auto:N"),
        ("benchmark.py", ["--cp", "2"], "there is no flag --cp here; instead: --set cp=N"),
        ("scaling", ["--qqq"], "there is no flag --qqq"),
        ("benchmark.py", ["llama"], "unexpected argument 'llama'; did you mean --model llama or --parallel llama?"),
        ("benchmark.py", ["--platform", "nvida"], "--platform cannot be 'nvida'; did you mean nvidia?"),
        ("plan", ["--gpus", "x" * 5000], f"--gpus: {'x' * 40!r} is not a whole number from 1 to 10,000,000"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line_with_what_was_meant(command, flags, said):
    done = run_command(command, *flags)
    prog = command if command.endswith(".py") else f"tprimat {command}"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said} ({prog} --help)\n")


def test_a_mistyped_command_is_answered_the_same_way(capsys):
    with pytest.raises(SystemExit) as end:
        main(["comprae"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: COMMAND cannot be 'comprae'; did you mean compare? (tprimat --help)\n"
    assert main([]) == 2
    assert "compare" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_its_version(command):
    done = run_command(command, "--version")
    assert (done.returncode, done.stdout) == (0, f"tprimat {__version__}\n")


def plans(*flags):
    done = run_command("benchmark.py", "--dry-run", "--json", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["plans"]


def test_a_layout_of_the_moment_needs_no_strategy():
    one, other = plans("--platform", "nvidia", "--gpus", "8", "--tp", "2", "--pp", "2", "--set", "vpp=2")
    assert (one["strategy"], one["model"], other["model"]) == ("tp2_pp2_vpp2", "llama", "qwen")
    for plan in (one, other):
        degrees = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "data_parallel")
        assert [plan["workload"][degree] for degree in degrees] == [2, 2, 2, 2]
    (plan,) = plans("--platform", "nvidia", "--gpus", "4", "--model", "llama", "--set", "cp=2")
    assert (plan["strategy"], plan["workload"]["context_parallel"], plan["workload"]["tensor_parallel"]) == ("cp2", 2, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--parallel", "balanced", "--tp", "2"), "--parallel balanced already says how models are split."),
        (("--gpus", "3", "--tp", "3"), "num_attention_heads (32) must be a multiple of tensor_model_parallel_size (3).\n"),
        (("--gpus", "8", "--set", "cp=3"), "world size (8) is not divisible by 3.\n"),
        (("--set", "ep=3"), "expert_model_parallel_size is 3, but llama-3.1-8b-tiny has no experts.\n"),
    ],
)
def test_a_layout_of_the_moment_that_cannot_be_is_refused_at_its_flag(flags, said):
    done = run_command("benchmark.py", "--dry-run", "--platform", "cpu", "--model", "llama", *flags)
    assert (done.returncode, done.stderr.startswith(f"error: {said}"), "\n  at    --" in done.stderr) == (2, True, True), (
        done.stderr
    )
    assert " parallelism." not in done.stderr.partition("\n  try ")[2], "what to type is no place in the configuration"


def test_several_strategies_and_models_are_run_one_after_the_other():
    planned = plans("--platform", "nvidia", "--parallel", "balanced,truly_identical", "--model", "qwen, llama", "--runs", "2")
    named = [(plan["strategy"], plan["model"]) for plan in planned]
    assert named[::2] == [("balanced", "qwen"), ("balanced", "llama"), ("truly_identical", "qwen"), ("truly_identical", "llama")]
    assert named[::2] == named[1::2]
    assert len({plan["run_directory"] for plan in planned}) == 8
    wrong = run_command("benchmark.py", "--dry-run", "--parallel", "balanced,balance")
    assert wrong.returncode == 2
    assert "There is no strategy 'balance'" in wrong.stderr


def test_flags_stay_few():
    parsers = {name: parser_of(name, name) for name in COMMANDS}
    flags = {name: [one for one in parser._actions if one.option_strings] for name, parser in parsers.items()}
    counted = {name: len(several) - len(("--help", "--version")) for name, several in flags.items()}
    assert counted["run"] <= 28
    assert sum(counted.values()) <= 110, counted


def test_choices_of_options_are_those_that_the_code_knows():
    known = {
        "platform": PlatformName,
        "size": schema.Size,
        "precision": schema.Precision,
        "routing": schema.Routing,
        "flops": FlopConvention,
    }
    for option in (*OPTIONS, *COUNTING):
        assert option.choices == get_args(known.pop(option.name, None)) or option.name == "peak"
    assert known == {}
    flags = COMMANDS["plan"]["flags"]
    assert flags["--precision"]["choices"] == list(FORMATS)
    assert flags["--engine"]["choices"] == list(ENGINE_NAMES)
