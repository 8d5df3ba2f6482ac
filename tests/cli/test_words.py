"""Words on the command line that mean nothing, or that nothing can be done about: one message, exit 2, nothing written."""

import os
from pathlib import Path

import pytest
from commands import run_command

ROOT = Path(__file__).parents[2]
RUNS, CASES = ROOT / "tests" / "runs", ROOT / "benchmarks" / "records" / "explain-cases"
HIDDEN = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
"""So that no run starts on a machine with GPUs."""
SAY_THE_WORD = ("models", "plan", "peak")
"""Commands that may say the word itself instead of its place."""
RUN = ("--dry-run", "--platform", "cpu", "--model", "llama")
COMPARE, PEAK = ("--results-dir", RUNS / "cpu"), ("--results-dir", RUNS / "h100")
PLAN = ("--model", "llama-3.1-70b", "--gpu", "H100 SXM")
LLAMA = ("--model", "llama-3.1-8b")
ROW, ON_H100 = "megatron-bridge-2604-llama-3-70b-h100", ("--dry-run", "--set", "gpu=H100")


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
        ("compare.py", (*COMPARE, "--output", "x.gif"), "no known suffix"),
        ("compare.py", (*COMPARE, "--fail-if-slower", "much"), "--fail-if-slower is 'much'."),
        ("compare.py", (*COMPARE, "--fail-if-slower", "150%"), "--fail-if-slower is '150%'."),
        ("compare.py", (*COMPARE, "--set", "warmup=few"), "--set warmup is 'few'"),
        ("compare.py", (*COMPARE, "--baseline", "nothing"), "The results hold no run in nothing."),
        ("peak", (*PEAK, "--nodes", "1,two"), "'two' is not a whole number from 1"),
        ("peak", (*PEAK, "--nodes", "1,2,"), "'' is not a whole number from 1"),
        ("peak", (*PEAK, "--scaling-efficiency", "1.5"), "--scaling-efficiency is '1.5'."),
        ("peak", ("--results-dir", "nowhere"), "There is no file or folder nowhere."),
        ("peak", (), "no folder of results"),
        ("archive", ("none", "x.tar.gz"), "There is no file or folder none."),
        ("archive", (RUNS, "x.zip"), "  try   results.tar.gz\n"),
        ("models", ("llama-4",), "There is no model 'llama-4'"),
        ("models", ("gemma",), "  try   one of python3 -m tprimat models, or your own under models in config.yaml ("),
        ("models", ("--sequence", "0"), "--sequence is gone"),
        ("plan", (), "plan needs a model."),
        ("plan", (*PLAN, "--gpus", "64", "--budget", "1000"), "--tokens 1T"),
        ("plan", ("--model", "qwen3-next-80b-a3b", "--gpu", "H100 SXM"), "DeltaNet"),
        ("plan", ("--model", "llama-3.1-70b", "--gpu", "H2000"), "try   H200 SXM, H200 NVL, H20"),
        ("plan", ("--model", "llama-4", "--gpu", "H100 SXM"), "There is no model 'llama-4'."),
        ("plan", (*PLAN, "--gpus", "64", "--nodes", "7"), "64 GPUs are not the same number on each of 7 nodes."),
        ("plan", (*PLAN, "--gpus", "63", "--nodes", "9", "--global-batch-size", "5"), "There is no valid layout."),
        ("plan", (*PLAN, "--sequence-length", "999999"), "out of range"),
        ("plan", (*LLAMA, "--gpu", "A100 SXM 80GB", "--precision", "fp8"), "--precision bf16, fp16, or a"),
        ("plan", (*LLAMA, "--gpu", "V100 SXM2 16GB"), "try   --precision fp16, or a later GPU\n"),
        ("plan", (*PLAN, "--gpus", "4", "--nodes", "8"), "try   --gpus 8\n"),
        ("plan", LLAMA, "this machine is not known"),
        ("plan", (*PLAN, "--probes", "nowhere"), "There is no probes.jsonl in nowhere."),
        ("reproduce", ("nobody-s-row",), "There is no published row 'nobody-s-row'."),
        ("reproduce", ("tprimat-h100-qwen", *ON_H100), "tprimat-h100-qwen cannot be reproduced."),
        ("reproduce", (ROW, "--dry-run", "--set", "gpu=A100"), "ran in fp8, in which A100 SXM 80GB does not multiply."),
        ("reproduce", ("megatron-bridge-2604-gpt-oss-120b-h100", *ON_H100), "gpt-oss-120b cannot be trained."),
        ("reproduce", ("megatron-bridge-deepseek-v3-h100-fp8", *ON_H100, "--set", "gpus=1"), "does not fit 1 GPU."),
        ("reproduce", (ROW,), "This machine shows no GPU."),
        ("reproduce", (ROW, CASES / "first-machine" / "dp2"), "-layers, bf16: another model."),
        ("reproduce", (ROW, "nowhere"), "There is no file or folder nowhere."),
    ],
)
def test_a_word_without_a_meaning_is_refused_at_once(program, words, says, tmp_path):
    done = run_command(program, *words, cwd=tmp_path, environment=HIDDEN)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "\n  at    " in done.stderr or program in SAY_THE_WORD
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
