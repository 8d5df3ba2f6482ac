"""A log of a framework whose steps are not read is refused by that framework's name.

The lines are those of public logs, or as the framework's code prints them.
"""

import pytest
from a_log import LOGS, iterations, run_from

from tprimat.core.errors import RecordError

SETTINGS = [
    "[2021-05-26 04:51:31,918] [INFO] [config.py:752:print]   train_batch_size ............. 128",
    "[2021-05-26 04:51:31,918] [INFO] [config.py:752:print]   fp16_enabled ................. True",
]
LINES = dict(line.split("\t") for line in (LOGS / "foreign.tsv").read_text(encoding="utf8").splitlines())
"""A framework, and a line of it."""
TIMER = "[2023-12-29 13:02:49,654] [INFO] [timer.py:260:stop] epoch=0/micro_step={0}/global_step={0}, "
TIMER += "RunningAvgSamplesPerSec=110.8, CurrSamplesPerSec=112.0, MemAllocated=1.87GB, MaxMemAllocated=6.12GB"
FLAGS = {"gpus": 8, "accelerator": "H100 SXM"}


@pytest.mark.parametrize("name", LINES)
def test_the_framework_is_named(name):
    for model in ("llama", "auto"):
        with pytest.raises(RecordError) as caught:
            run_from([*SETTINGS, LINES[name], LINES[name]], model, **FLAGS)
        assert caught.value.what.startswith(f"train.log looks like a log of {name}")
        assert (caught.value.where, bool(caught.value.why), bool(caught.value.fix)) == ("train.log:3", True, True)


def test_gpt_neox_is_named_beside_the_timer_of_deepspeed_too():
    with pytest.raises(RecordError, match="GPT-NeoX"):
        run_from([*SETTINGS, TIMER.format(10), LINES["GPT-NeoX"], TIMER.format(20)], "llama", **FLAGS)


def test_a_framework_that_is_read_counts_beside_one_that_is_not():
    lines = [text for step in (10, 20, 30) for text in (LINES["Hugging Face's Trainer"], TIMER.format(step))]
    run = run_from([*SETTINGS, *lines], "llama", **FLAGS)
    assert [step.step_seconds for step in run.steps] == [pytest.approx(128 / 112)] * 2


def test_rates_of_samples_without_a_batch_are_said_with_the_flag_that_makes_them_times():
    lines = [TIMER.format(step) for step in (10, 20, 30)]
    says = "--global-batch-size gives one by a rate (the log prints 112 sequences/s"
    for claims, more in (({}, ")"), ({"sequence_tokens": 4096}, ", 458,752 tokens/s)")):
        run = run_from(lines, "llama", **FLAGS, **claims)
        assert not run.steps
        assert any(note.endswith(says + more) for note in run.notes)


def test_a_pod_named_for_its_rank_is_no_sign_of_primus():
    pod = "[pod/llama-rank-0/train] "
    run = run_from([pod + line for line in iterations(1, [2.0, 1.9, 1.9, 1.9], total=4)], "llama", **FLAGS)
    assert run.record.engine == "megatron-lm"


def test_a_run_of_mlperf_that_fails_before_its_first_step_is_that_of_the_framework_beside_it():
    lines = [
        "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/8",
        ':::MLLOG {"namespace": "", "key": "global_batch_size", "value": 8}',
        "Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 56.00 MiB.",
    ]
    record = run_from(lines, "llama", **FLAGS).record
    assert (record.engine, record.outcome) == ("nemo", "out_of_memory")
    with pytest.raises(RecordError, match="MLPerf"):
        run_from(lines[:2], "llama", **FLAGS)
