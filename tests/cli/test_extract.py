"""extract_primus_metrics.py: flags, contradictions, pipes that grow, and files that are no logs."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run_command, run_script

from tprimat.core.flops import flop_per_token, parameters
from tprimat.core.models import model_shape
from tprimat.logs.parse import NAMES
from tprimat.records.discover import read_result

ROOT = Path(__file__).parent.parent.parent
LOGS = ROOT / "tests" / "logs"
SCRIPT = ROOT / "extract_primus_metrics.py"


def extract(*arguments):
    return run_command(SCRIPT.name, *arguments)


@pytest.fixture
def log(tmp_path):
    """Copies a log, so that what is written beside it goes with the test."""

    def copy(name, change=lambda text: text):
        path = tmp_path / "train.log"
        path.write_text(change((LOGS / f"{name}.log").read_text(encoding="utf8")), encoding="utf8")
        return path

    return copy


def result_of(path):
    return read_result(path)


def test_the_help_names_every_dialect():
    text = "".join(run_script(SCRIPT.name, "--help").stdout.split())
    assert all(name in text for name in ("auto", *NAMES))


@pytest.mark.parametrize(
    ("name", "model", "shape", "stated"),
    [
        ("megatron_lm_mixtral", "mixtral", "mixtral-8x7b", (46.7, 12.9, 0)),
        ("primus_qwen3_30b_a3b", "qwen3_moe", "qwen3-30b-a3b", (30.5, 3.3, 0)),
        ("primus_deepseek_v2_lite", "deepseek-v2-lite", "deepseek-v2-lite", (15.7, 2.4, 102_400 * 2048)),
    ],
)
def test_a_log_of_experts_has_the_parameters_that_its_paper_states(log, name, model, shape, stated):
    """arXiv 2401.04088; 2505.09388, table 2; 2405.04434, appendix B, whose 2.4 is that without the embedding."""
    path = log(name)
    done = extract("--log-file", path, "--model-name", "auto", "--gpu", "MI300X", "--num-nodes", "2")
    assert done.returncode == 0, done.stderr
    (made,) = path.parent.glob(f"benchmark_*_{model}.json")
    result = result_of(made)
    assert result.run.shape == model_shape(shape)
    routing = {"mixtral": "natural", "qwen3_moe": "balanced"}  # as each dump says
    assert result.run.routing == routing.get(model)
    assert result.run.expert_capacity == ("unlimited" if model in routing else None)
    total, active, uncounted = stated
    count = parameters(result.run.shape)
    assert count.total / 1e9 == pytest.approx(total, abs=0.05)
    assert (count.active - uncounted) / 1e9 == pytest.approx(active, abs=0.06)
    printed = re.findall(r"\(TFLOP/s/GPU\): ([0-9.]+)", path.read_text(encoding="utf8"))[2:]
    gpus = result.run.machine.gpus
    ours = [flop_per_token(result.run.shape, 4096) * step.tokens / 1e12 for step in result.steps[2:]]
    ours = [flop / step.step_seconds / gpus for flop, step in zip(ours, result.steps[2:], strict=True)]
    assert ours == pytest.approx([float(rate) for rate in printed], rel=0.01)


def test_our_own_log_says_all_that_the_record_needs(log):
    path = log("tprimat")
    done = extract("--log-file", path, "--model-name", "llama")
    assert done.returncode == 0, done.stderr
    result = result_of(path.parent / "benchmark_cpu_llama.json")
    run = result.run
    assert (run.run_id, run.outcome, run.clock) == (
        "20261122-071355-909655-llama-minimal_communication-2",
        "completed",
        "step_end",
    )
    assert (run.strategy, run.seed, run.shape.name, run.evidence.parameters) == (
        "minimal_communication",
        7,
        "llama-3.1-8b-tiny",
        4595840,
    )
    assert [step.tokens for step in result.steps] == [64] * 4
    assert "the log holds 2 attempts" in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "recorded"),
    [
        ("--model-name", "qwen", "llama"),
        ("--num-gpus", "8", "1"),
        ("--sequence-length", "2048", "32"),
        ("--parallel", "balanced", "minimal_communication"),
        ("--gpu", "MI300X", "AMD EPYC"),
    ],
)
def test_a_flag_that_our_own_record_contradicts_is_refused(flag, value, recorded, log):
    path = log("tprimat")
    done = extract("--log-file", path, "--model-name", "llama", flag, value)
    assert done.returncode == 2
    assert f"{flag} {value} contradicts the log, which says {recorded}." in done.stderr


def test_a_model_that_our_own_record_contradicts_is_mended_without_leaving_out_a_flag_that_is_needed(log):
    assert "  try   auto, or llama\n" in extract("--log-file", log("tprimat"), "--model-name", "qwen").stderr


@pytest.mark.parametrize("what", ["missing", "folder", "no log", "flag"])
def test_a_model_that_does_not_exist_is_said_before_what_else_is_wrong(what, log, tmp_path):
    path = {"missing": tmp_path / "none.log", "folder": tmp_path, "no log": ROOT / "Makefile", "flag": log("megatron_lm")}[what]
    done = extract("--log-file", path, "--model-name", "lama", "--gpu", "MI300X")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: There is no model 'lama'.")


def test_the_file_that_a_run_wrote_itself_stays_as_it_is(log):
    path = log("tprimat")
    file = path.parent / "benchmark_cpu_llama.json"
    assert extract("--log-file", path, "--model-name", "llama").returncode == 0
    document = json.loads(file.read_text(encoding="utf8"))
    document["run"]["source"], document["run"]["exit_code"] = None, 0
    file.write_text(json.dumps(document), encoding="utf8")
    before = file.read_bytes()
    done = extract("--log-file", path, "--model-name", "llama")
    assert f"kept        {file}, which the run itself wrote" in done.stdout
    assert file.read_bytes() == before


def test_our_own_log_that_ends_early_was_interrupted(log):
    path = log("tprimat", lambda text: text[: text.rindex(" [tprimat 2026")])
    done = extract("--log-file", path, "--model-name", "llama")
    assert "interrupted: The log ends after step 3 of 4 without saying why." in done.stderr


def test_a_primus_log_becomes_a_benchmark_file_beside_it(log):
    path = log("primus_core_head")
    done = run_script(SCRIPT.name, "--log-file", path, "--model-name", "llama", "--gpu", "MI300X")
    assert done.returncode == 0, done.stderr
    result = result_of(path.parent / "benchmark_rocm_llama.json")
    assert [step.step for step in result.steps] == [1, 2, 3, 4]
    run = result.run
    assert (run.machine.platform, run.machine.accelerator, run.machine.gpus) == ("rocm", "MI300X", 8)
    assert (run.engine, run.clock, run.global_batch_sequences, run.sequence_tokens) == ("primus", "framework", 128, 8192)
    assert (run.source.dialect, len(run.source.sha256), run.shape.name) == ("primus", 64, "llama-3.1-8b")
    assert (run.outcome, run.source.truncated) == ("interrupted", True)
    document = json.loads((path.parent / "benchmark_rocm_llama.json").read_text(encoding="utf8"))
    assert document["raw_learning_rates"] == [5e-6, 1e-5, 9.99e-6, 9.9e-6]
    assert document["performance_metrics"]["tokens_per_second_per_gpu"] == pytest.approx(13386, rel=1e-3)


def test_the_seeds_flags_are_taken(log):
    path = log("primus_legacy_gb")
    flags = ("--num-gpus", 8, "--global-batch-size", 128, "--sequence-length", 8192)
    done = extract("--log-file", path, "--model-name", "qwen", *flags, "--output", path.parent / "out.json")
    assert done.returncode == 0, done.stderr
    assert result_of(path.parent / "out.json").run.machine.accelerator is None


@pytest.mark.parametrize(
    ("name", "flags", "both", "line"),
    [
        ("primus_core_head", ("--num-gpus", "4"), ("4", "8"), 2),
        ("primus_core_head", ("--global-batch-size", "64"), ("64", "128"), 2),
        ("primus_core_head", ("--sequence-length", "2048"), ("2048", "8192"), 2),
        ("primus_core_head", ("--gpu", "NVIDIA H200"), ("NVIDIA H200", "primus"), 2),
        ("primus_core_head", ("--gpu", "H100"), ("--gpu H100", "primus runs on AMD accelerators only"), 2),
        ("primus_core_head", ("--gpu", "rtx-4090"), ("--gpu rtx-4090", "primus"), 2),
        ("megatron_lm", ("--sequence-length", "8192", "--gpu", "H200"), ("8192", "4096"), 15),
        ("torchtitan", ("--gpu", "NVIDIA H100 80GB HBM3"), ("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 3),
        ("megatron_lm", ("--parallel", "maximum_performance", "--gpu", "H200"), ("4", "2"), 2),
    ],
)
def test_a_flag_that_contradicts_the_log_names_both_and_the_line(log, name, flags, both, line):
    done = extract("--log-file", log(name), "--model-name", "llama", *flags)
    assert done.returncode == 2
    assert "contradicts the log" in done.stderr
    assert all(value in done.stderr for value in both)
    assert f"train.log:{line}\n" in done.stderr


def without_split(text):
    text = text.replace(
        "tensor_model_parallel_size ...................... 2", "tensor_model_parallel_size ...................... 1"
    )
    return text.replace("tensor-model-parallel size: 2", "tensor-model-parallel size: 1").replace("4015263744", "8030261248")


def test_a_model_of_another_size_than_the_log_counts_is_refused(log):
    path = log("megatron_lm", without_split)
    done = extract("--log-file", path, "--model-name", "qwen", "--gpu", "H200")
    assert done.returncode == 2
    assert (
        "--model-name qwen contradicts the log: qwen-2.5-7b has 7,615,616,512 parameters, the log counts 8,030,261,248"
        in done.stderr
    )
    assert extract("--log-file", path, "--model-name", "llama", "--gpu", "H200").returncode == 0


def test_an_mfu_that_no_hardware_reaches_is_not_printed_without_a_word(log):
    path = log("megatron_lm")
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H200")
    assert "warning: this will not count: MFU is 4" in done.stderr
    compared = run_command("compare.py", "--results-dir", path.parent, "--output", path.parent / "c.md")
    assert compared.returncode == 1
    assert "this cannot be: MFU is 4" in compared.stdout
    assert any(
        "no hardware can reach" in text
        for text in json.loads((path.parent / "benchmark_cuda_llama.json").read_text())["metrics"]["warnings"]
    )


def test_a_strategy_that_the_log_proves_is_recorded(log):
    path = log("megatron_lm")
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H200", "--parallel", "balanced")
    assert done.returncode == 0, done.stderr
    run = result_of(path.parent / "benchmark_cuda_llama.json").run
    assert (run.strategy, run.tensor_parallel, run.pipeline_parallel, run.outcome) == ("balanced", 2, 1, "completed")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu", "H200", "--parallel", "fastest"), "no strategy 'fastest'"),
        (("--gpu", "Voodoo 3"), "'Voodoo 3' is not known"),
        (("--gpu", "H100"), "try   --gpu 'H100 SXM', --gpu 'H100 PCIe', --gpu 'H100 NVL'\n"),
        ((), "such as --gpu 'NVIDIA H100 80GB HBM3' or --gpu MI300X"),
        (("--gpu", "H200", "--num-nodes", "3"), "does not divide 4"),
        (("--gpu", "H200", "--dialect", "nemo"), "no training step of nemo"),
    ],
)
def test_what_cannot_be_is_said(log, flags, said):
    done = extract("--log-file", log("megatron_lm"), "--model-name", "llama", *flags)
    assert done.returncode == 2
    assert said in done.stderr


def test_an_unknown_model_names_the_known_ones(log):
    done = extract("--log-file", log("primus_core_head"), "--model-name", "lama")
    assert done.returncode == 2
    assert "llama, qwen" in done.stderr


def test_more_than_one_node_is_asked_for(log):
    path = log("primus_core_head", lambda text: text.replace("rank-7/8", "rank-15/16"))
    assert "--num-nodes" in extract("--log-file", path, "--model-name", "llama").stderr
    done = extract("--log-file", path, "--model-name", "llama", "--num-nodes", 2)
    assert done.returncode == 0, done.stderr
    machine = result_of(path.parent / "benchmark_rocm_llama.json").run.machine
    assert (machine.gpus_per_node, machine.nodes) == (8, 2)


def test_a_gzipped_log_reads_the_same(log):
    path = log("megatron_lm")
    packed = path.with_suffix(".log.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for number, file in enumerate((path, packed)):
        out = path.parent / f"{number}.json"
        assert extract("--log-file", file, "--model-name", "llama", "--gpu", "H200", "--output", out).returncode == 0
    assert result_of(path.parent / "0.json").steps == result_of(path.parent / "1.json").steps


def test_a_gzipped_log_that_is_cut_short_gives_a_record_that_says_so(log):
    path = log("megatron_lm", lambda text: text.replace("[after training", "[x") + "x" * 200_000 + "\n")
    packed = path.with_suffix(".log.gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), 0)[:-1000])
    done = extract("--log-file", packed, "--model-name", "llama", "--gpu", "H200")
    assert done.returncode == 0, done.stderr
    assert result_of(path.parent / "benchmark_cuda_llama.json").run.source.truncated


def test_a_last_line_cut_in_a_number_is_not_believed(log):
    path = log("primus_core_head", lambda text: text[: text.rindex("9702.4") + 2])
    done = extract("--log-file", path, "--model-name", "llama")
    assert done.returncode == 0, done.stderr
    result = result_of(path.parent / "benchmark_rocm_llama.json")
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert result.run.source.truncated


def test_zero_bytes_in_the_middle_leave_a_record_that_says_so(log):
    path = log("megatron_lm", lambda text: text + " " * 20_000 + "\0" * 5000 + "\n")
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H200")
    assert done.returncode == 0, done.stderr
    assert result_of(path.parent / "benchmark_cuda_llama.json").run.source.truncated


STEPS = "".join(
    f" iteration {step}/ 4 | elapsed time per iteration (ms): {1000 + step}.0 | global batch size: 128 | lm loss: 9.0 |\n"
    for step in range(1, 5)
)


@pytest.mark.parametrize(
    ("torn", "steps"),
    [
        ("  context_parallel_size ......... 0\n" + STEPS, 4),
        (STEPS.replace("lm loss: 9.0", "lm loss: 9.0E+199"), 4),
        (STEPS.replace("1002.0", "1002.0E+20"), 3),
        (STEPS.replace("iteration 1/", "iteration 0/"), 3),
    ],
)
def test_a_record_of_a_torn_log_can_be_read(tmp_path, torn, steps):
    path = tmp_path / "train.log"
    path.write_text("using world size: 8\n" + torn)
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H100 SXM", "--sequence-length", 2048)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("*.json")
    assert len(read_result(written).steps) == steps


def test_gpus_that_cannot_hold_the_degrees_of_the_log_are_refused(tmp_path):
    path = tmp_path / "train.log"
    degrees = (
        "  tensor_model_parallel_size ......... 4\n  pipeline_model_parallel_size ....... 4\n  context_parallel_size ... 1\n"
    )
    path.write_text(degrees + STEPS)
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H100 SXM", "--num-gpus", 8)
    assert done.returncode == 2
    assert "--num-gpus 8 contradicts the log: tensor_parallel 4, pipeline_parallel 4, context_parallel 1." in done.stderr
    assert "multiple of 16" in done.stderr


@pytest.mark.parametrize("name", ["actual seqlen", "memory(GiB)"])
def test_a_torn_number_of_hundreds_of_digits_is_left_out(tmp_path, name):
    path = tmp_path / "train.log"
    line = " iteration {}/ 4 | elapsed time per iteration (ms): 1000.0 | global batch size: 128 | {}: {} | lm loss: 9.0 |\n"
    path.write_text("".join(line.format(step, name, "9" * 300) for step in range(1, 5)))
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H100 SXM", "--num-gpus", 8, "--sequence-length", 2048)
    assert done.returncode == 0, done.stderr
    assert "128 sequences of 2,048 tokens" in done.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no line"),
        (bytes(range(256)) * 100, "is not a text log"),
        ("iteration 1".encode("utf-16"), "is not a text log"),
        (b"\x1f\x8bnot gzip at all", "gzip stream is damaged"),
        (b"hello\nworld\n", "looked for|No line holds"),
        (b"Yesterday it said `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.31 GiB`.\n", "No line holds"),
        (b"- loss: nan means that it diverged\n", "No line holds"),
        (b"# Errors\n```text\nTraceback (most recent call last):\nValueError: CUDA out of memory\n```\n", "No line holds"),
        (b"# Batch\n\n```yaml\n  micro_batch_size: 1\n  global_batch_size ........ 96\n```\n", "No line holds"),
        ((ROOT / "README.md").read_bytes(), "No line holds"),
        ((ROOT / "docs" / "troubleshooting.md").read_bytes(), "No line holds"),
    ],
)
def test_files_that_are_no_training_log_get_a_clear_error(tmp_path, content, said):
    path = tmp_path / "train.log"
    path.write_bytes(content)
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H100 SXM")
    assert done.returncode == 2
    assert any(part in done.stderr for part in said.split("|"))
    assert "cli/" not in done.stderr
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "outcome", "cause"),
    [
        (
            "Traceback (most recent call last):\n  File 'x'\nValueError: num_attention_heads (28) must be a multiple\n",
            "failed",
            "28",
        ),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a\n", "out_of_memory", "3.31 GiB"),
        ("  num_layers ........ 32\n  world_size ........ 8\n", "failed", "ends before the first step"),
    ],
)
def test_a_run_that_died_before_its_first_step_is_a_record_with_its_cause(tmp_path, content, outcome, cause):
    path = tmp_path / "train.log"
    path.write_text(content, encoding="utf8")
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "MI300X")
    assert done.returncode == 1
    assert cause in done.stderr
    result = result_of(tmp_path / "benchmark_rocm_llama.json")
    assert (result.run.outcome, cause in result.run.cause, result.steps) == (outcome, True, ())


def test_a_failure_is_named_even_where_the_log_does_not_tell_the_machine(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total\n", encoding="utf8"
    )
    done = extract("--log-file", path, "--model-name", "llama")
    assert done.returncode == 1
    assert "3.31 GiB" in done.stderr
    assert "no record: The log does not tell which GPU ran" in done.stderr


def test_steps_without_a_time_are_a_failure_that_says_what_is_missing(log):
    path = log("torchtitan_wps")
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H200")
    assert done.returncode == 1
    assert "The log names 3 steps, and none has a time." in done.stderr
    assert "--global-batch-size" in done.stderr
    assert result_of(path.parent / "benchmark_cuda_llama.json").run.outcome == "failed"
    batch = ("--num-gpus", 8, "--global-batch-size", 16, "--sequence-length", 8192)
    assert extract("--log-file", path, "--model-name", "llama", "--gpu", "H200", *batch).returncode == 0


def test_a_missing_file_is_named(tmp_path):
    done = extract("--log-file", tmp_path / "no.log", "--model-name", "llama")
    assert (done.returncode, "no.log cannot be read" in done.stderr) == (2, True)


def test_a_run_that_died_after_some_steps_is_a_record_with_its_cause(log):
    error = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 191.98 GiB\n"
    path = log("primus_core_head", lambda text: text + error)
    done = extract("--log-file", path, "--model-name", "llama")
    assert done.returncode == 1
    run = result_of(path.parent / "benchmark_rocm_llama.json").run
    assert run.outcome == "out_of_memory"
    assert "3.31 GiB" in run.cause


def test_standard_input_is_followed_while_it_grows(tmp_path):
    lines = (LOGS / "megatron_lm.log").read_text(encoding="utf8").splitlines(keepends=True)
    command = [sys.executable, str(SCRIPT), "--log-file", "-", "--follow", "--model-name", "llama", "--gpu", "H200"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, text=True)
    out = tmp_path / "benchmark_cuda_llama.json"
    process.stdin.writelines(lines[:-4])
    deadline = time.monotonic() + 50
    while not out.exists() and time.monotonic() < deadline:
        process.stdin.write("a line that says nothing\n")
        process.stdin.flush()
        time.sleep(0.05)
    assert result_of(out).run.outcome == "running"
    process.stdin.writelines(lines[-4:])
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    result = result_of(out)
    assert (result.run.outcome, len(result.steps)) == ("completed", 6)


def test_ctrl_c_keeps_what_was_read(log):
    path = log("megatron_lm", lambda text: text[: text.index("[after training")].replace("6 | consumed", "9 | consumed"))
    command = [sys.executable, str(SCRIPT), "--log-file", str(path), "--follow", "--model-name", "llama", "--gpu", "H200"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        out = path.parent / "benchmark_cuda_llama.json"
        deadline = time.monotonic() + 50
        while not out.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=50) == 0
        assert "what was read so far is kept" in process.stderr.read()
    result = result_of(out)
    assert (result.run.outcome, len(result.steps)) == ("interrupted", 6)


def test_a_followed_file_ends_when_training_is_done(log):
    path = log("megatron_lm")
    text = path.read_text(encoding="utf8").splitlines(keepends=True)
    path.write_text("".join(text[:-2]), encoding="utf8")
    command = [sys.executable, str(SCRIPT), "--log-file", str(path), "--follow", "--model-name", "llama", "--gpu", "H200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with path.open("a", encoding="utf8") as file:
        file.write(text[-2][:100])
        file.flush()
        os.fsync(file.fileno())
        file.write(text[-2][100:] + text[-1])
    assert process.wait(timeout=50) == 0
    assert len(result_of(path.parent / "benchmark_cuda_llama.json").steps) == 6


def test_a_log_of_many_short_steps_is_read_whole(tmp_path):
    path = tmp_path / "train.log"
    line = next(
        text for text in (LOGS / "megatron_lm.log").read_text(encoding="utf8").splitlines() if " iteration        3/" in text
    )
    with path.open("w", encoding="utf8") as file:
        for number in range(3, 20_003):
            text = line.replace("iteration        3/       6", f"iteration {number:8d}/  900000")
            file.write(text.replace("760.1", f"{740 + number % 997 / 10:.1f}") + "\n")
    done = extract("--log-file", path, "--model-name", "llama", "--gpu", "H200")
    assert done.returncode == 0, done.stderr
    steps = result_of(tmp_path / "benchmark_cuda_llama.json").steps
    assert [step.step for step in steps] == list(range(3, 20_003))
    assert steps[997].step_seconds == pytest.approx((740 + 1000 % 997 / 10) / 1000)


def peak_kib(path, output):
    """Peak memory of reading a log, by VmHWM: getrusage's maximum is inherited through exec from the process of the tests."""
    code = (
        "import re, sys; from tprimat.cli.main import start; start('extract', 'extract', sys.argv[1:]); "
        "print('peak', re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    )
    flags = ("--log-file", str(path), "--model-name", "llama", "--gpu", "MI300X", "--output", str(output))
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "peak " in done.stdout, done.stderr
    return int(done.stdout.rsplit("peak ", 1)[1])


def test_memory_depends_on_the_steps_of_a_log_not_on_its_other_text(tmp_path):
    noise = "[20260822 07:39:10][rank-3/8][INFO ] [--module_utils.py:227] : some words about a bucket of parameters and a rank\n"
    step = (LOGS / "primus_core_head.log").read_text(encoding="utf8").splitlines()[3] + "\n"
    peaks = []
    for lines in (0, 200):
        path = tmp_path / f"train_{lines}.log"
        with path.open("w", encoding="utf8") as file:
            for number in range(3, 2003):
                file.write(step.replace("iteration        3/", f"iteration {number:8d}/") + noise * lines)
        peaks.append(peak_kib(path, tmp_path / "o.json"))
        assert len(result_of(tmp_path / "o.json").steps) == 2000
    assert path.stat().st_size > 40e6
    assert peaks[1] - peaks[0] < 16 * 1024
