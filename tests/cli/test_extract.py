"""extract_primus_metrics.py: flags, contradictions, pipes that grow, and files that are no logs."""

import json
import re
from pathlib import Path

import pytest
from commands import run_command

from tprimat.core.flops import flop_per_token, parameters
from tprimat.core.models import model_shape
from tprimat.records.discover import read_result

ROOT = Path(__file__).parent.parent.parent
LOGS = ROOT / "tests" / "logs"
SCRIPT = ROOT / "extract_primus_metrics.py"
NO_LINE = "holds no training step of a known framework"
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 191.98 GiB\n"
)


@pytest.fixture
def log(tmp_path):
    """Copies a log, or writes a text as one, so that what is written beside it goes with the test."""

    def copy(name="", change=lambda text: text, text=None):
        path = tmp_path / "train.log"
        text = (LOGS / f"{name}.log").read_text(encoding="utf8") if text is None else text
        path.write_text(change(text), encoding="utf8")
        return path

    return copy


def extract(path, model="llama", *flags):
    """What the command does with a log."""
    return run_command(SCRIPT.name, "--log-file", path, "--model-name", model, *flags)


def extracted(path, model="llama", *flags):
    """The record of a log that is read."""
    done = extract(path, model, *flags)
    assert done.returncode == 0, done.stderr
    (written,) = path.parent.glob("benchmark_*.json")
    return read_result(written)


def refused(path, model="llama", *flags):
    """What the command says of a log that it refuses."""
    done = extract(path, model, *flags)
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize(
    ("name", "shape", "stated", "routing"),
    [
        ("megatron_lm_mixtral", "mixtral-8x7b", (46.7, 12.9, 0), ("natural", "unlimited")),
        ("primus_qwen3_30b_a3b", "qwen3-30b-a3b", (30.5, 3.3, 0), ("balanced", "unlimited")),
        ("primus_deepseek_v2_lite", "deepseek-v2-lite", (15.7, 2.4, 102_400 * 2048), (None, None)),
    ],
)
def test_a_log_of_experts_has_the_parameters_that_its_paper_states(log, name, shape, stated, routing):
    """arXiv 2401.04088; 2505.09388, table 2; 2405.04434, appendix B, whose 2.4 is that without the embedding."""
    path = log(name)
    result = extracted(path, "auto", "--gpu", "MI300X", "--num-nodes", 2)
    run, (total, active, uncounted) = result.run, stated
    assert (run.ran.shape, run.ran.routing, run.ran.expert_capacity) == (model_shape(shape), *routing)
    count = parameters(run.ran.shape)
    assert (count.total / 1e9, (count.active - uncounted) / 1e9) == (
        pytest.approx(total, abs=0.05),
        pytest.approx(active, abs=0.06),
    )
    printed = re.findall(r"\(TFLOP/s/GPU\): ([0-9.]+)", path.read_text(encoding="utf8"))[2:]
    flop = flop_per_token(run.ran.shape, 4096) / 1e12 / run.machine.gpus
    ours = [flop * step.tokens / step.step_seconds for step in result.steps[2:]]
    assert ours == pytest.approx([float(rate) for rate in printed], rel=0.01)


def test_our_own_log_says_all_that_the_record_needs(log):
    path = log("tprimat")
    result = extracted(path)
    run = result.run
    assert (run.run_id, run.outcome, run.clock) == (
        "20261122-071355-909655-llama-minimal_communication-2",
        "completed",
        "step_end",
    )
    assert (run.strategy, run.seed, run.ran.shape.name, run.evidence.parameters) == (
        "minimal_communication",
        7,
        "llama-3.1-8b-tiny",
        4595840,
    )
    assert [step.tokens for step in result.steps] == [64] * 4
    assert "attempt 1 of 2: " in extract(path).stderr
    file = path.parent / "benchmark_cpu_llama.json"
    document = json.loads(file.read_text(encoding="utf8"))
    document["run"]["source"], document["run"]["exit_code"] = None, 0
    file.write_text(json.dumps(document), encoding="utf8")
    before = file.read_bytes()
    assert f"kept: {file}, which the run itself wrote" in extract(path).stderr
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("flag", "value", "recorded"),
    [
        ("--model-name", "qwen", "llama"),
        ("--num-gpus", "8", "1"),
        ("--sequence-length", "2048", "32"),
        ("--gpu", "MI300X", "AMD EPYC"),
    ],
)
def test_a_flag_that_our_own_record_contradicts_is_refused(flag, value, recorded, log):
    said = refused(log("tprimat"), "llama", flag, value)
    assert f"{flag} {value} contradicts the log, which says {recorded}." in said
    assert flag != "--model-name" or "  try   auto, or llama\n" in said


@pytest.mark.parametrize(
    ("name", "flags", "both", "line"),
    [
        ("primus_core_head", ("--num-gpus", "4"), ("4", "8"), 2),
        ("primus_core_head", ("--global-batch-size", "64"), ("64", "128"), 2),
        ("primus_core_head", ("--sequence-length", "2048"), ("2048", "8192"), 2),
        ("primus_core_head", ("--gpu", "H100"), ("--gpu H100", "it shows rocm"), 2),
        ("primus_core_head", ("--gpu", "rtx-4090"), ("--gpu rtx-4090", "rocm"), 2),
        ("megatron_lm", ("--sequence-length", "8192", "--gpu", "H200"), ("8192", "4096"), 15),
        ("torchtitan", ("--gpu", "NVIDIA H100 80GB HBM3"), ("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 3),
    ],
)
def test_a_flag_that_contradicts_the_log_names_both_and_the_line(log, name, flags, both, line):
    said = refused(log(name), "llama", *flags)
    assert all(words in said for words in ("contradicts the log", f"train.log:{line}\n", *both))


@pytest.mark.parametrize(
    ("name", "change", "steps"),
    [
        ("primus_core_head", lambda text: text[: text.rindex("9702.4") + 2], 3),  # a last line that is cut in a number
        ("primus_core_head", lambda text: text + " " * 20_000 + "\0" * 5000 + "\n", 4),
    ],
)
def test_a_log_that_is_cut_or_holds_zero_bytes_leaves_a_record_that_says_so(log, name, change, steps):
    result = extracted(log(name, change))
    assert (len(result.steps), result.run.source.truncated) == (steps, True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", NO_LINE),
        (bytes(range(256)) * 100, "is not a text log"),
        ("iteration 1".encode("utf-16"), "is not a text log"),
        (b"\x1f\x8bnot gzip at all", "is a damaged gzip file"),
        (b"hello\nworld\n", NO_LINE),
        (b"Yesterday it said `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.31 GiB`.\n", NO_LINE),
        (b"- loss: nan means that it diverged\n", NO_LINE),
        (b"# Errors\n```text\nTraceback (most recent call last):\nValueError: CUDA out of memory\n```\n", NO_LINE),
        (b"# Batch\n\n```yaml\n  micro_batch_size: 1\n  global_batch_size ........ 96\n```\n", NO_LINE),
        ((ROOT / "README.md").read_bytes(), NO_LINE),
        ((ROOT / "docs" / "troubleshooting.md").read_bytes(), NO_LINE),
        (None, "train.log cannot be read"),
    ],
)
def test_files_that_are_no_training_log_get_a_clear_error(tmp_path, content, said):
    path = tmp_path / "train.log"
    if content is not None:
        path.write_bytes(content)
    text = refused(path, "llama", "--gpu", "H100 SXM")
    assert (said in text, "cli/" in text) == (True, False)
    assert list(tmp_path.iterdir()) == ([path] if content is not None else [])


@pytest.mark.parametrize(
    ("content", "outcome", "cause"),
    [
        ("Traceback (most recent call last):\nValueError: num_attention_heads (28) must be a multiple of 8\n", "failed", "28"),
        (OUT_OF_MEMORY, "out_of_memory", "3.31 GiB"),
        ("  num_layers ........ 32\n  world_size ........ 8\n", "failed", "ends before the first step"),
    ],
)
def test_a_run_that_died_before_its_first_step_is_a_record_with_its_cause(log, content, outcome, cause):
    path = log(text=content)
    done = extract(path, "llama", "--gpu", "MI300X")
    assert (done.returncode, cause in done.stdout) == (1, True)
    result = read_result(path.parent / "benchmark_rocm_llama.json")
    assert (result.run.outcome, cause in result.run.cause, result.steps) == (outcome, True, ())


def test_a_model_may_have_its_publishers_name_and_a_run_without_a_record_its_hint(log):
    path = log(text=OUT_OF_MEMORY)
    done = extract(path, "meta-llama/Llama-3.1-8B", "--gpu", "MI300X")
    assert (done.returncode, done.stdout.startswith("Llama-3.1-8B")) == (1, True)
    path.write_text(OUT_OF_MEMORY.replace("HIP", "CUDA"), encoding="utf8")
    assert "  try   lower --micro-batch-size" in extract(path, "meta-llama/Llama-3.1-8B").stderr


def test_a_log_whose_steps_have_no_time_says_what_is_missing_and_is_no_failure(log):
    path = log("torchtitan_wps")
    done = extract(path, "llama", "--gpu", "NVIDIA H100 96GB")
    assert done.returncode == 1
    assert "none of the logged steps has a time: --global-batch-size" in done.stdout + done.stderr
    assert read_result(path.parent / "benchmark_cuda_llama.json").run.outcome == "interrupted"
