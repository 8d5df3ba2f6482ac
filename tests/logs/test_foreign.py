"""A log of a framework whose steps are not read is refused by that framework's name.

The lines are those of public logs, or as the framework's code prints them.
"""

import pytest
from a_log import iterations, run_from

from tprimat.core.errors import RecordError

SETTINGS = [
    "[2021-05-26 04:51:31,918] [INFO] [config.py:752:print]   train_batch_size ............. 128",
    "[2021-05-26 04:51:31,918] [INFO] [config.py:752:print]   fp16_enabled ................. True",
]
LINES = {
    "the Trainer of Hugging Face": "0: {'loss': 2.9859, 'grad_norm': 0.9704080820083618, 'learning_rate': 4.175257731958763e-05}",
    "verl": "(TaskRunner pid=16292) step:2 - global_seqlen/mean:547190.500 - actor/kl_loss:0.001 - timing_s/step:96.551",
    "NeMo 1": "Epoch 0:   1%|          | 795/77225 [9:07:58<878:01:48, 41.36s/it, loss=3.1, v_num=, "
    "reduced_train_loss=3.090, global_step=794.0, consumed_samples=1.63e+6]",
    "PyTorch Lightning": "Epoch 0:   5%|5         | 3/62 [02:59<58:44,  0.02it/s, v_num=8, train_loss=6.930]",
    "DeepSpeed before": "[2022-03-11 02:06:58,985] [INFO] [timer.py:189:stop] 0/40, SamplesPerSec=83.48609168106144, "
    "MemAllocated=0.26GB, MaxMemAllocated=9.02GB",
    "NeMo Automodel": "2026-08-10 15:55:20 | INFO | root | step 9 | epoch 0 | loss 0.6974 | grad_norm 1.5436 | lr 1.00e-05 | "
    "mem 24.90 GiB | tps 11278.56(1409.82/gpu) | num_label_tokens 21541",
    "OLMo": "    train/CrossEntropyLoss=12.18",
    "nanoGPT": "iter 1631: loss 4.0863, time 561.94ms",
    "LitGPT": "Ep 1 | iter 4 | step 1: loss train (curr): 1.585, val (prev val iter): None | iter time: 181.34 ms (opt.step)",
    "Meta Lingua": "0: INFO    24-10-10 10:00:00.123456 - step: 10  acc: 0  loss:  7.1234  grad: 1.23e+00  flops: 2.9e+14  "
    "wps: 1.2e+04  iter: 0.5  data: 0.001  lr: 1.0e-04  mem: 45%",
    "torchtune": "Step 3 | loss:12.292285919189453 lr:8.999999999999999e-06 tokens_per_second_per_gpu:466.8531799316406 ",
    "torchtune, whose": "1|10|Loss: 1.7051:   1%|          | 10/1000 [00:33<55:00,  3.33s/it]",
    "Composer": "[batch=12/30]:",
    "nanotron": "iteration: 5 / 20 | consumed_tokens: 1.05M | time_per_iteration_ms: 4.21K | lm_loss: 11.1",
    "GPT-NeoX": " samples/sec: 187.3 | iteration       10/  320000 | elapsed time per iteration (ms): 63400.0 | lm_loss: 7.1 |",
    "Megatron-LM before 2021": " iteration  5/ 120000 | elapsed time per iteration (ms): 16491.5 | learning rate 1.000E-04 |",
    "Megatron-LM before 2021, or BLOOM's": "[default7]: iteration    31214/  115311 | consumed tokens:  97829879808 | "
    "elapsed time per iteration (s): 106.46 | lm loss: 2.198845E+00 |",
    "LiBai": "[09/10 10:40:56 lb.utils.events]:  eta: 21:00:38  iteration: 19/10000  consumed_samples: 80  total_loss: 9.895  "
    "time: 7.5187 s/iter",
}
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
    lines = [text for step in (10, 20, 30) for text in (LINES["the Trainer of Hugging Face"], TIMER.format(step))]
    run = run_from([*SETTINGS, *lines], "llama", **FLAGS)
    assert [step.step_seconds for step in run.steps] == [pytest.approx(128 / 112)] * 2


def test_rates_of_samples_without_a_batch_are_said_with_the_flag_that_makes_them_times():
    lines = [TIMER.format(step) for step in (10, 20, 30)]
    says = "--global-batch-size gives one by the printed rate (the log prints 112 sequences/s"
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
