"""Attempts in one log, and the devices that its lines show, whatever a caller says."""

import pytest
from a_log import LOGS, iterations, run_from

from tprimat.core.errors import ConfigError

CANCELLED = "slurmstepd: error: *** JOB 1 ON node01 CANCELLED AT 2026-01-01T00:00:00 DUE TO {} ***"
FULL = (
    "[rank0]: Traceback (most recent call last):",
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.00 GiB is free.",
)
RANKS = [f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/8" for rank in range(8)]
PROGRESS = "Training epoch 0, iteration {0}/99 | global_batch_size: 32 | global_step: {0} | train_step_timing in s: 1.5"


def read(*lines, gpu="H100 SXM"):
    run = run_from(lines, "llama", gpus=8, sequence_tokens=2048, accelerator=gpu)
    return run, [note for note in run.notes if note.startswith("attempt ")]


def test_steps_after_a_cancelled_job_are_another_attempt_without_a_line_that_begins_it():
    run, attempts = read(*iterations(1, [1.0] * 12), CANCELLED.format("PREEMPTION"), *iterations(13, [1.0] * 5))
    assert [step.step for step in run.steps] == list(range(13, 18))
    assert attempts == [
        "attempt 1 of 2: interrupted after step 12: The scheduler or the cloud took the job's nodes away. "
        "(it restarts by itself if requeuing is on)"
    ]
    late, none = read(*iterations(1, [1.0] * 12), CANCELLED.format("TIME LIMIT"), *iterations(13, [1.0]))
    assert (late.record.outcome, len(late.steps), none) == ("timed_out", 13, [])


def test_ranks_that_print_their_start_twice_begin_one_attempt():
    steps = [PROGRESS.format(step) for step in range(12)]
    assert read(*RANKS, *RANKS, *steps)[1] == []
    run, attempts = read(*RANKS, *steps[:5], *FULL, *RANKS, *FULL, *RANKS, *RANKS, *steps[3:])
    assert [attempt[:56] for attempt in attempts] == [
        "attempt 1 of 3: out of memory after step 5: The GPU ran ",
        "attempt 2 of 3: out of memory before its first step: The",
    ]
    assert len(run.steps) == 9


SHOWN = {line: shown for shown, line in (row.split("\t") for row in (LOGS / "devices.tsv").read_text().splitlines())}
"""Line -> what it shows of the devices that ran."""


@pytest.mark.parametrize("line", SHOWN)
def test_a_measured_speed_is_never_that_of_a_device_which_the_log_contradicts(line):
    with pytest.raises(ConfigError) as caught:
        read(line, *iterations(1, [1.0] * 3))
    assert caught.value.what.startswith(f"--gpu H100 SXM contradicts the log: it shows {SHOWN[line]}")
    assert caught.value.where == "train.log:1"


def test_a_device_that_only_the_log_names_is_taken_from_it():
    for line, name in list(SHOWN.items())[:4]:
        assert read(line, *iterations(1, [1.0] * 3), gpu=None)[0].record.machine.accelerator == name


def test_a_run_without_steps_is_recorded_with_the_device_of_its_log():
    line = "RuntimeError: NPU out of memory. Tried to allocate 26.44 GiB (NPU 2; 60.96 GiB total capacity; 25.36 GiB free; x)"
    run, _ = read("Traceback (most recent call last):", line)
    assert (run.record.machine.accelerator, run.record.machine.platform) == ("NPU of 60.96 GiB", "other")
    assert run.notes[0].startswith("caution: --gpu H100 SXM contradicts line 2 of the log: it shows npu, and H100 SXM has")
    tpu = ["TFRT TPU v5", "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes."]
    cause = run_from(tpu, "llama-3-70b", gpus=8, accelerator="TPU v5p").record.cause
    assert cause == "The TPU ran out of memory: it tried to allocate 4.0 GiB."


def test_tokens_follow_from_rates_and_times_of_four_digits():
    rates = ((2.389, "6.859e+03"), (2.443, "6.706e+03"), (2.127, "7.702e+03"))
    lines = [
        f"{PROGRESS.format(step)[:-3]}{time} | tokens_per_sec_per_gpu: {rate}" for step, (time, rate) in enumerate(rates, 527)
    ]
    run = run_from(lines, "qwen3-30b-a3b", gpus=8, accelerator="H100 SXM")
    assert [step.tokens for step in run.steps] == [32 * 4096] * 3
    line = "completed step: {}, seconds: 6.051, TFLOP/s/device: 357.1, Tokens/s/device: 8123.462, loss: 6.765"
    run = run_from([line.format(7), line.format(8)], "mistral-7b", gpus=8, accelerator="v6e-8")
    assert [step.tokens for step in run.steps] == [393216] * 2


def test_the_last_resort_is_the_last_line_about_an_error_of_a_log_without_steps():
    warning = "node1:1:2 [0] p2p.cc:220 NCCL WARN hipIpcGetMemHandle failed : invalid argument"
    after = ["node1:1:2 [0] NCCL INFO p2p.cc:473 -> 3", "[titan] - root - WARNING - Error running lspci, fallback to"]
    record = run_from([warning, *after], "llama", gpus=8, accelerator="H100 SXM").record
    assert record.cause == f"The log ends with an error of a kind that is not known here: {warning}"
    ends = [
        "srun: error: n1: task 0: Exited with exit code 1",
        "slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2024-04-03 ***",
    ]
    lines = ["AssertionError: Expected 56 tokens", *ends, *["srun: error: n1: tasks 2,6-7: Killed"] * 9]
    record = run_from(lines, "llama", gpus=8, accelerator="H100 SXM").record
    assert (record.cause, record.hint.split("; ")[1]) == ("AssertionError: Expected 56 tokens", "task 0 on n1 failed first")
    assert read(*iterations(1, [1.0] * 3), warning)[0].record.outcome == "interrupted"


def test_a_loss_that_stays_not_finite_ends_a_log_as_diverged():
    line = iterations(1, [1.0] * 4)
    lost = [text.replace("lm loss: 2.0", "lm loss: nan") for text in line]
    assert read(*line[:2], *lost[2:])[0].record.outcome == "diverged"
    assert read(*line[:3], lost[3].replace("lm loss: nan", "number of skipped iterations: 1"))[0].record.outcome == "interrupted"
    searching = [text.replace("lm loss: 2.0", "number of skipped iterations: 1") for text in line]
    assert read(*searching)[0].record.outcome == "interrupted", "fp16 looks for its first loss scale"
    assert read(*[text.replace("skipped", "nan") for text in searching[:2]])[0].record.outcome == "diverged"
