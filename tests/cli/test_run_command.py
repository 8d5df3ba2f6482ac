"""./benchmark.py and ./validate_config.py as a user starts them, as far as no training is needed."""

import ast
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command, run_script

ROOT = Path(__file__).parents[2]
SCRIPTS = ("benchmark.py", "pretrain_llama.py", "pretrain_qwen.py", "validate_config.py", "config_loader.py", "utils.py")


def call(*arguments, script="benchmark.py", cwd=None, environment=None):
    return run_command(script, *arguments, cwd=cwd, environment=environment)


def plans_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["plans"]


def dry(*arguments, **how):
    return call("--dry-run", "--json", "--platform", "cpu", *arguments, **how)


def test_help_starts_in_under_three_tenths_of_a_second():
    seconds = []
    for _ in range(3):  # of processor time: a busy machine makes a clock unfair
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_script("benchmark.py", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        assert "--parallel STRATEGY" in done.stdout
    assert min(seconds) < 0.3


def test_a_dry_run_prints_the_plan_and_the_exact_command_and_leaves_nothing(tmp_path):
    done = call("--dry-run", "--platform", "nvidia", "--parallel", "balanced", "--output-dir", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0
    assert "Using parallelism strategy: balanced\nParallelism: TP=2, PP=1, DP=4, GradAccum=32\n" in done.stdout
    assert "Using parallelism strategy: balanced\nParallelism: TP=2, PP=2, DP=2, GradAccum=64\n" in done.stdout
    commands = re.findall(r"^Command \(--write writes the plan.json that it needs\): .*", done.stdout, re.MULTILINE)
    assert (len(commands), done.stdout.count("try: --gpu 'H100 SXM'")) == (2, 1), "of what both models need"
    assert all("--nproc-per-node=8" in line and f"--plan {tmp_path}/out/runs/" in line for line in commands)
    assert "pretrain_llama.py" in commands[0]
    assert "pretrain_qwen.py" in commands[1]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_repetitions_once_and_every_command_where_it_writes_their_plans(tmp_path):
    words = ("--dry-run", "--platform", "cpu", "--model", "llama", "--runs", "3")
    shown = call(*words, cwd=tmp_path).stdout
    assert (shown.count("Workload: "), "stdlib, 3 runs\n" in shown) == (1, True)
    assert call(*words, "--write", cwd=tmp_path).stdout.count("Command: ") == 3


def test_a_dry_run_for_another_machine_predicts_memory_and_says_what_would_be_faster(tmp_path):
    words = ("--dry-run", "--model", "llama", "--parallel", "maximum_performance", "--gpu")
    done = call(*words, "h100", "--write", cwd=tmp_path)
    assert re.search(r"predicted on the fullest rank, at most [\d.]+ GiB; a GPU has 79.2 GiB", done.stdout)
    assert re.search(r"\nPredicted: [\d.]+ s \[[\d.]+ s, [\d.]+ s\] a step, [\d,]+ tokens/s/GPU\n", done.stdout)
    assert "minimal_communication is predicted 16.8 % faster than maximum_performance" in done.stdout
    assert f"--plan {next(tmp_path.rglob('plan.json'))}\n" in done.stdout, "the command can be copied and run"
    tight = call(*words, "A100 SXM 40GB", "--gpus", "4", "--sequence-length", "8192", cwd=tmp_path)
    assert re.search(r"problem  memory .*: does not fit\n +try: what fits by prediction: --micro-batch-size 2 ", tight.stdout)
    assert "Predicted: " not in tight.stdout
    swept = call(*words, "h100", "--nodes", "2", "--sweep", "micro_batch_size=1,2", cwd=tmp_path).stdout
    assert re.search(r"\) micro_batch_size=1 on (?s:.*) GPUs wait for the host 5.0 of 6.7 s a step: --set ", swept)
    assert "balanced is predicted" in call(*words, "h100", "--gpus", "4", cwd=tmp_path).stdout, "where TP4 PP2 cannot run"
    for flags, said in (
        ([*words, "V100"], "V100 SXM2 32GB does not multiply in bf16."),
        ([*words, "h100", "--platform", "amd"], "H100 SXM is not a GPU of amd."),
        (["--gpu", "h100"], "--gpu describes another machine."),
        (["--launcher", "slurm", "--sweep", "tp=1,2", "--tp", "2"], "--sweep tp varies what --tp sets."),
        (["--write"], "--write belongs to --dry-run, for a run that starts here."),
    ):
        assert said in call(*flags, cwd=tmp_path).stderr


def test_routing_concerns_models_with_experts_alone():
    plans = plans_of(dry("--model", "mixtral,llama", "--set", "routing=balanced"))
    assert [(plan["model"], plan["workload"]["routing"]) for plan in plans] == [("mixtral", "balanced"), ("llama", None)]
    (default,) = plans_of(dry("--model", "qwen3_moe"))
    assert (default["workload"]["routing"], default["workload"]["expert_parallel"]) == ("natural", 8)


def test_a_dry_run_checks_what_a_run_would_check(tmp_path):
    done = call("--dry-run", "--platform", "nvidia", "--model", "llama", "--output-dir", tmp_path / "out", cwd=tmp_path)
    checks = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("ok ", "absent ", "problem "))]
    assert checks == ["GPUs", "data", "memory", "disk"]
    memory = r"^absent   memory +[\d.]+ GiB predicted .*, at most [\d.]+ GiB; the memory of a GPU is not known here$"
    assert re.search(memory, done.stdout, re.MULTILINE)
    assert call("--dry-run", "--platform", "nvidia", "--set", "data=text:no-such-book.txt", cwd=tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_on_several_nodes_needs_no_address():
    flags = ("--dry-run", "--platform", "nvidia", "--model", "llama", "--nodes", "2")
    done = call(*flags)
    assert done.returncode == 0, done.stderr
    assert "--nnodes=2 --rdzv-endpoint=FIRST_NODE:29500 --rdzv-conf=rank=0" in done.stdout
    assert "MASTER_ADDR=FIRST_NODE NODE_RANK=0..1" in " ".join(done.stdout.split())
    there = call(*flags, environment={"MASTER_ADDR": "gpu07", "NODE_RANK": "1"})
    assert "--nnodes=2 --rdzv-endpoint=gpu07:29500 --rdzv-conf=rank=1" in there.stdout


def test_strategy_and_folder_come_from_the_environment_and_a_flag_wins(tmp_path):
    environment = {"PARALLEL": "balanced", "OUTPUT_DIR": str(tmp_path / "from-environment")}
    (plan,) = plans_of(dry("--model", "llama", environment=environment))
    assert (plan["strategy"], plan["output_directory"]) == ("balanced", str(tmp_path / "from-environment"))
    flags = ["--model", "llama", "--parallel", "truly_identical", "--output-dir", tmp_path / "from-flag"]
    (plan,) = plans_of(dry(*flags, environment=environment))
    assert (plan["strategy"], plan["output_directory"]) == ("truly_identical", str(tmp_path / "from-flag"))
    (plan,) = plans_of(dry("--model", "llama", cwd=tmp_path, environment={"PARALLEL": "", "OUTPUT_DIR": ""}))
    assert (plan["strategy"], plan["output_directory"]) == ("minimal_communication", str(tmp_path / "output"))


def test_each_flag_arrives_in_the_plan():
    flags = "--model qwen --gpus 4 --nodes 2 --steps 7 --micro-batch-size 2 --global-batch-size 64 --sequence-length 512"
    more = "--precision bf16 --set size=full --set data=mock --set seed=5 --set experiment.name=x --engine megatron"
    (plan,) = plans_of(dry(*flags.split(), *more.split()))
    assert (plan["model"], plan["size"], plan["nodes"], plan["gpus_per_node"], plan["steps"]) == ("qwen", "full", 2, 4, 7)
    asked = {"micro_batch_sequences": 2, "global_batch_sequences": 64, "sequence_tokens": 512, "matmul_dtype": "bf16"}
    assert plan["workload"].items() >= asked.items()
    assert (plan["dataset"], plan["seed"], plan["engine_reason"]) == ("mock", 5, "asked for")


SEEDS_STRATEGY = """\
parallelism:
  my_custom_config:
    llama:
      nvidia:
        tensor_model_parallel_size: 2
        pipeline_model_parallel_size: 1
        data_parallel_size: 4
        gradient_accumulation_steps: 32
"""
"""As README files of the first TPrimat print it."""


@pytest.fixture
def seeds_config(tmp_path):
    """config.yaml with a strategy that knows one model and one platform, and with sizes that are no longer used."""
    text = (ROOT / "config.yaml").read_text().replace("parallelism:\n", SEEDS_STRATEGY, 1)
    text = text.replace("llama31_8b\n", "llama31_8b\n    model_size_gb: 88\n    memory_per_gpu_tp4: 22\n")
    text = text.replace("qwen25_7b\n", "qwen25_7b\n    model_size_gb: 136\n    memory_per_gpu_tp4_pp2: 17\n")
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_a_strategy_for_one_model_runs_it_and_says_what_the_other_is_missing(seeds_config):
    arguments = ("--dry-run", "--json", "--platform", "nvidia", "--config", seeds_config, "--parallel", "my_custom_config")
    one, both, other = (call(*arguments, *more) for more in (("--model", "llama"), (), ("--model", "qwen")))
    (plan,) = plans_of(one)
    work = plan["workload"]
    assert (work["tensor_parallel"], work["data_parallel"]) == (2, 4)
    assert work["global_batch_sequences"] // work["micro_batch_sequences"] // 4 == 32
    assert "left out" not in one.stderr
    assert [plan["model"] for plan in plans_of(both)] == ["llama"]
    missing = f"The strategy my_custom_config has no layout for qwen.\n  at    {seeds_config}:"
    assert f"left out: {missing}" in both.stderr
    assert (other.returncode, other.stdout) == (2, "")
    assert f"error: {missing}" in other.stderr
    assert "  try   add qwen: {nvidia: {tensor_model_parallel_size: ..., " in other.stderr


MISTAKES = [
    (["--model", "lama"], "There is no model 'lama' in models.\n  at    config.yaml:"),
    (["--parallel", "balance"], "There is no strategy 'balance' in parallelism.\n  at    config.yaml:"),
    (["--runs", "0"], "--runs is '0'.\n  at    --runs\n"),
    (["--set", "size=huge"], "--set size is 'huge'.\n  at    --set size\n"),
    (["--gpus", "3", "--parallel", "balanced"], "world size (3) is not divisible by 2.\n  at    config.yaml:"),
    (["--precision", "fp8"], "fp8 cannot run on a CPU.\n  at    --precision platform_optimizations.cpu.precision\n"),
    (["--set", "data=words"], "dataset is 'words'.\n  at    --set data training.data.dataset\n"),
    (["--set", "warmup=few"], "benchmarking.warmup_steps is 'few'.\n  at    --set warmup benchmarking.warmup_steps\n"),
    (["--set", "speed=fast"], "speed is not a key of the configuration.\n  at    --set speed\n"),
    (["--config", "nothing.yaml"], "nothing.yaml cannot be read: No such file or directory.\n  at    nothing.yaml\n"),
]


@pytest.mark.parametrize(("flags", "says"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_mistake_exits_2_on_stderr_without_a_traceback(flags, says):
    done = call("--platform", "cpu", "--dry-run", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {says}"), done.stderr


def test_validation_prints_every_cell_and_exits_0():
    done = call(script="validate_config.py")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert len(rows) == 64
    assert "mixtral    nvidia balanced               does not fit: TP=2, " in done.stdout
    assert "qwen on H100 SXM: minimal_communication is predicted 4.71 times as fast as maximum_performance" in done.stdout
    assert rows[-1] == "60 of 60 valid, 10 of them predicted too large for H100 SXM (--gpu names another)"
    assert sum(" valid: TP=" in row for row in rows[:60]) == 50
    assert {tuple(row.split()[:3]) for row in rows} >= {("llama", "nvidia", "balanced"), ("qwen", "cpu", "maximum_performance")}


def test_validation_exits_1_when_a_cell_is_not_valid_and_says_why():
    done = call("--gpus", "4", script="validate_config.py")
    assert done.returncode == 1
    assert "not valid: world size (4) is not divisible by 8." in done.stdout
    assert "error: world size (4) is not divisible by 8.\n  at    config.yaml:" in done.stderr
    valid, total, *_ = (int(word) for word in done.stdout.splitlines()[-1].split() if word.isdigit())
    assert 0 < valid < total == 60


def commands_of(script):
    docstring = ast.get_docstring(ast.parse((ROOT / script).read_text())) or ""
    return [line for line in docstring.splitlines() if line.startswith(("./", "python3 ", "PARALLEL="))]


@pytest.mark.parametrize("command", [command for script in SCRIPTS for command in commands_of(script)])
def test_a_command_in_a_scripts_docstring_works(command, tmp_path):
    """Those that would train are asked for their plan instead; test_run_trainings.py trains through the same scripts."""
    trains = any(script in command for script in ("benchmark.py", "pretrain_"))
    program, *words = shlex.split(command + " --dry-run" * (trains and "--dry-run" not in command))
    if program.startswith("./"):
        done = run_command(program.removeprefix("./"), *words)
    else:
        (tmp_path / "python3").symlink_to(sys.executable)
        search = f"{Path(sys.executable).parent}{os.pathsep}{tmp_path}{os.pathsep}{os.environ['PATH']}"
        line = ["bash", "-c", command + " --dry-run" * trains]
        done = subprocess.run(line, cwd=ROOT, env=os.environ | {"PATH": search}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("where", "lacks", "command"),
    [
        (("amd", "primus"), "Primus was not found.", "primus-cli-direct.sh"),
        (("nvidia", "nemo"), "The engine nemo needs", "pretrain_llama.py"),
    ],
)
def test_a_dry_run_for_another_machine_shows_an_engine_that_is_not_here(where, lacks, command, tmp_path):
    platform, engine = where
    words = ("--model", "llama", "--platform", platform, "--engine", engine, "--dry-run")
    done = run_command("benchmark.py", *words, "--output-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
    assert lacks in " ".join(done.stdout.split())
    assert "The machine that runs this needs it." in " ".join(done.stdout.split())
    started = run_command("benchmark.py", *words[:-1], "--output-dir", tmp_path)
    assert (started.returncode, lacks in started.stderr) == (2, True)
