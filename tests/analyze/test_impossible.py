"""Runs that cannot be what they say are shown with the reason and not counted, whoever wrote them."""

import json
from pathlib import Path

import pytest
from changes import evidence as evidence_of
from changes import replace, slowed
from commands import run_command

from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.core.accelerators import recorded_name
from tprimat.core.flops import parameters
from tprimat.core.models import model_shape, padded_vocabulary
from tprimat.records.discover import read_result
from tprimat.records.schema import NodeRecord
from tprimat.report.words import finding_words, not_counted_words

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "tests" / "runs" / "foreign" / "train_amd_prim_llama.json"
LLAMA = ROOT / "tests" / "runs" / "h100" / "runs" / "h100-llama-0"
WHOLE = replace(model_shape("llama-3.1-8b"), vocabulary=padded_vocabulary(model_shape("llama-3.1-8b")))
SEEN = evidence_of(source="running_framework", world_size=8, tensor_parallel=1, parameters=parameters(WHOLE).total)


@pytest.fixture
def sound():
    result = read_result(LLAMA)
    return replace(result, run=replace(result.run, evidence=SEEN))


def faster(result, factor):
    steps = [
        replace(step, step_seconds=step.step_seconds / factor, ended_at_seconds=step.ended_at_seconds / factor)
        for step in result.steps
    ]
    return replace(result, steps=tuple(steps))


def ran(**fields):
    return lambda result: replace(result, run=replace(result.run, **fields))


def on(**fields):
    return lambda result: ran(machine=replace(result.run.machine, **fields))(result)


def seen(**fields):
    return lambda result: replace(result, run=replace(result.run, evidence=replace(result.run.evidence, **fields)))


def stepped(**fields):
    return lambda result: replace(result, steps=tuple(replace(step, **fields) for step in result.steps))


def later_batches_doubled(result):
    steps = [replace(step, tokens=step.tokens * (1 + (step.step > 23))) for step in result.steps]
    return replace(result, steps=tuple(steps))


def last_loss_lost(result):
    return replace(result, steps=(*result.steps[:-1], replace(result.steps[-1], loss=None, finite=False)))


def every_fifth_step_hurried(result):
    return slowed(result, [0.01 if one.step % 5 == 0 else 1 for one in result.steps])


def last_losses_left_out(result, every=1):
    left = [replace(one, loss=None) if one.step > 36 - 6 * every and one.step % every == 0 else one for one in result.steps]
    return replace(result, steps=tuple(left))


def without_steps(*left):
    return lambda result: replace(result, steps=tuple(one for one in result.steps if one.step in left))


TRAPS = [
    (lambda result: faster(result, 10), "MFU is 348 %, which no hardware can reach"),
    (every_fifth_step_hurried, "8 of 37 steps are faster than its GPU can compute them, such as step 5"),
    (stepped(tokens=1_000_000), "37 of 37 steps have 1,000,000 tokens, but 128 sequences of 2,048 make 262,144"),
    (later_batches_doubled, "17 of 37 steps have 524,288 tokens, but 128 sequences of 2,048 make 262,144"),
    (on(accelerator="NVIDIA B200"), "B200 has 178.2 GiB, but 79.2 GiB were recorded"),
    (lambda result: on(memory_bytes=None)(stepped(peak_allocated_bytes=90 << 30)(result)), "90.0 GiB, but its GPU has 79.2"),
    (ran(nodes=(NodeRecord(host="a", accelerator="NVIDIA H200", gpus=8),)), "the record names H100 SXM, but its nodes H200 SXM"),
    (last_loss_lost, "no finite loss in 1 of 40 steps"),
    (last_losses_left_out, "it has losses of 30 of 40 steps, and fewer toward its end"),
    (lambda result: last_losses_left_out(result, every=2), "it has losses of 32 of 40 steps, and fewer toward its end"),
    (without_steps(*range(1, 10), *range(30, 41)), "it had 40 steps, but only 20 are left"),
    (lambda result: without_steps(*range(1, 21))(ran(steps_recorded=40)(result)), "it had 40 steps, but only 20 are left"),
    (stepped(step_seconds=2.0), "its steps sum to 78 s, but 190.7 s passed"),
    (lambda result: replace(result, stated_tokens_per_second=8e4), "the file states 80,000 tokens/s, but its own steps make 59,"),
    (lambda result: faster(ran(matmul_dtype=None, evidence=None)(result), 10), "3,448 TFLOP/s per GPU, but H100 SXM reaches 1,"),
    (seen(tensor_parallel=2), "tensor parallel is 1 in the record but 2 in its evidence"),
    (seen(tokens_per_step=77), "tokens a step is 262144 in the record but 77 in its evidence"),
    (seen(world_size=4), "GPU count is 8 in the record but 4 in its evidence"),
    (seen(parameters=7_000_000_000), "7,000,000,000 parameters ran, but the recorded shape has 8,030,261,248"),
    (ran(tensor_parallel=4, evidence=None), "its layout needs 32 GPUs, but 8 ran"),
    (ran(micro_batch_sequences=3), "a batch of 128 sequences is not a multiple of micro-batch 3 on 8 replicas"),
]


def counted(result):
    return not_counted_words(measure(result, MetricOptions()))


def test_a_sound_run_counts(sound):
    assert counted(sound) == ""
    assert counted(replace(sound, stated_tokens_per_second=62_000.0)) == ""
    half = recorded_name("AMD Instinct MI300X", 96 << 30)
    assert counted(on(accelerator=half, memory_bytes=96 << 30)(sound)) == "", "a partition is not the GPU that it is a part of"
    every_tenth = [replace(one, loss=one.loss if one.step % 10 == 0 else None) for one in sound.steps[:35]]
    assert counted(replace(sound, steps=tuple(every_tenth))) == "", "a log may print the loss of a few steps"
    assert counted(stepped(finite=False)(sound)) == "", "a gradient norm may overflow where the loss is finite"
    first = replace(sound.steps[0], loss=None, finite=False)
    assert counted(replace(sound, steps=(first, *sound.steps[1:]))) == "", "fp16 looks for its first loss scale"


@pytest.mark.parametrize(("trap", "reason"), TRAPS, ids=[reason for _, reason in TRAPS])
def test_what_cannot_be_is_not_counted_and_the_reason_is_given(sound, trap, reason):
    item = measure(trap(sound), MetricOptions(peak="sparse"))
    assert reason in not_counted_words(item)
    assert item.metrics is not None
    assert group_runs([item]) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"tokens_per_second": 90_000}, "the file states 90,000 tokens/s"), ({"tokens_per_second": 54_000}, None)],
)
def test_a_file_of_another_program_is_held_to_its_own_steps(tmp_path, change, reason):
    document = json.loads(FOREIGN.read_text()) | {"performance_metrics": change}
    (tmp_path / FOREIGN.name).write_text(json.dumps(document))
    done = run_command("compare.py", "--results-dir", tmp_path, "--output", tmp_path / "c.md")
    assert done.returncode == (0 if reason is None else 1)
    assert (f"{FOREIGN.name}: this cannot be: {reason}" in done.stdout) == (reason is not None)


def test_a_foreign_fp8_is_stated_and_not_proven(tmp_path):
    document = json.loads(FOREIGN.read_text()) | {"precision": "fp8"}
    (tmp_path / FOREIGN.name).write_text(json.dumps(document))
    done = run_command("compare.py", "--results-dir", tmp_path, "--output", tmp_path / "c.md")
    assert "The dtype is stated, not observed: llama MI300X." in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ({"started_at": "2099-01-01T00:00:00"}, "it started 2099-01-01T00:00:00 and ended at an unknown time: a clock was wrong"),
        (
            {"started_at": "2026-02-02T00:00:00Z", "ended_at": "2026-02-01T00:00:00"},
            "it started 2026-02-02T00:00:00Z and ended 2026-02-01T00:00:00: a clock was wrong",
        ),
    ],
)
def test_a_wrong_clock_is_named(sound, times, told):
    findings = measure(ran(**times)(sound), MetricOptions()).metrics.warnings
    assert any(told in finding_words(one) for one in findings)
