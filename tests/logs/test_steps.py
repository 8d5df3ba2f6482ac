"""Which steps of a log count, with which time: repeated lines, attempts, means with start-up."""

import pytest
from a_log import collect, column, dumped, iterations, lines_of, parse, reading_of, run_from

from tprimat.core.errors import ConfigError

MESH = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1, etp=1"
FLOAT8 = "Float8 tensorwise scaled training active"
TITAN_STEP = (
    "[rank{}]:[titan] 2026-02-24 19:46:17,508 - root - INFO - step: {:2}  loss: {:8.5f}  memory: 66.91GiB(37.51%)  tps: {:,}"
)


def test_doubled_lines_count_once_in_any_order():
    lines = lines_of("primus_core_head")[1:]
    copy = [line.replace("utils.py:429", "utils.py:425") for line in lines]
    one, two, three, four = zip(lines, copy, strict=True)
    reading = reading_of([*one, two[0], three[0], two[1], three[1], *four])
    assert (list(reading.contents.steps), reading.ended) == ([1, 2, 3, 4], [])


def test_the_second_line_of_a_process_may_be_a_mean_with_its_first():
    for first, printed, seconds in (
        (1, (15.0, 0.7524, 0.75), [15.0, 0.7524, 0.75]),  # that cannot be a mean
        (1, (33.687, 21.7617), [33.687]),  # without a third line
        (500, (89.2, 88.5, 87.9), [89.2, 88.5, 87.9]),  # a log that is cut
        (42, (9.0, 5.534, 5.48), [5.534, 5.48]),
        (501, (30.0, 17.75, 5.48), [5.5, 5.48]),  # a process that was resumed
    ):
        assert column(parse(iterations(first, printed, 2000)), "step_seconds") == pytest.approx(seconds)
    lines = [line for first, second in ((1, 10), (10, 1.9), (20, 1), (30, 1)) for line in iterations(first, [second])]
    assert column(parse(lines), "step_seconds") == [10.0, 1.0, 1.0, 1.0]


ONE, OTHER = dumped(world_size=8, seq_length=4096), dumped(world_size=4, seq_length=4096)


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (ONE + iterations(1, [30.0] + [6.0] * 29) + ONE + iterations(31, [90.0, 48.0] + [6.0] * 28), range(32, 61)),
        (ONE + iterations(1, [20.0] + [6.0] * 9) + iterations(4, [30.0, 17.75, 5.5, 5.5]), range(5, 8)),
        (ONE + iterations(1, [20.0] + [6.0] * 29) + OTHER + iterations(1, [20.0] + [12.0] * 9), range(1, 11)),
        (ONE + iterations(1, [20.0] + [6.0] * 29) + OTHER, range(1, 31)),
    ],
    ids=["goes on where it ended", "goes back", "with other GPUs", "dies at once"],
)
def test_the_last_attempt_with_steps_counts(lines, steps):
    reading = reading_of(lines)
    assert [column(parse(lines), "step"), len(reading.ended)] == [list(steps), 1]


def test_a_run_that_goes_on_with_other_gpus_without_saying_so_is_that_one_alone():
    text = "[rank-{}/{}][INFO] iteration {:8d}/ 30 | elapsed time per iteration (ms): {:.1f}/{:.1f} | lm loss: 2.0 |"
    lines = [text.format(7, 8, number, 12_500, 12_500) for number in range(1, 11)]
    lines += [text.format(15, 16, number, 6_250, 6_250) for number in range(11, 31)]
    result = parse(lines)
    assert (column(result, "step"), result.evidence.world_size) == (list(range(11, 31)), 16)


WIDE = '"mixed_precision_param": "bfloat16",'


@pytest.mark.parametrize(
    ("first", "second", "dtype"), [([WIDE, FLOAT8], [WIDE], "bf16"), ([WIDE], [WIDE, FLOAT8], "fp8"), ([FLOAT8], [], None)]
)
def test_an_attempt_in_another_dtype_is_that_one_alone(first, second, dtype):
    lines = [MESH, *first, *(TITAN_STEP.format(0, number, 9.5, 8000) for number in range(1, 11))]
    lines += [MESH, *second, *(TITAN_STEP.format(0, number, 9.5, 6000) for number in range(11, 31))]
    result = parse(lines, global_batch_sequences=64, sequence_tokens=8192)
    assert (result.steps[0].step, result.steps[-1].step, result.evidence.workload.matmul_dtype) == (11, 30, dtype)


def test_the_same_step_from_several_ranks_is_no_restart():
    rates = ((1, 900), (2, 10_050), (3, 10_007), (4, 10_010))
    lines = [MESH, *(TITAN_STEP.format(rank, step, 9 - step / 8, rate - rank) for step, rate in rates for rank in range(8))]
    assert reading_of(lines).ended == []
    result = parse(lines, global_batch_sequences=16, sequence_tokens=8192)
    assert column(result, "step") == [1, 2, 3, 4]
    assert result.steps[1].step_seconds == pytest.approx(16 * 8192 / (10_050 * 8))


@pytest.mark.parametrize("says_settings", [True, False])
def test_a_second_attempt_of_a_framework_that_prints_rates_replaces_the_first(says_settings):
    first = [TITAN_STEP.format(0, step, 9 - step / 8, 5_000 + step) for step in (1, 10, 20)]
    second = [TITAN_STEP.format(0, step, 8.5 - step / 8, 7_000 + step) for step in (1, 10, 20, 30)]
    lines = [MESH, *first, *([MESH] if says_settings else []), *second]
    result = parse(lines, global_batch_sequences=16, sequence_tokens=8192)
    assert column(result, "step_seconds") == pytest.approx([16 * 8192 / (rate * 8) for rate in (7001, 7010, 7020, 7030)])
    assert any("one line for 10 steps" in note for note in result.notes)
    assert not any("missing" in note for note in result.notes)


def test_settings_that_another_rank_prints_after_the_first_step_begin_no_attempt():
    contents = collect(ONE + iterations(1, [20.0]) + dumped(world_size=8) + iterations(2, [6.0, 6.0]))
    assert list(contents.steps) == [1, 2, 3]


def rated(label, value, **others):
    """Lines of a fork of Megatron-LM that print a rate, and no time."""
    further = "".join(f" {name}: {text} |" for name, text in others.items())
    text = " iteration {:8d}/ 60 | {}: {} |{} global batch size: 128 | lm loss: {:.3f} | grad norm: 1.0 |"
    return [text.format(number, label, value, further, 9 - number / 10) for number in range(1, 13)]


def test_a_rate_under_any_name_gives_the_time_and_contradicts_another():
    claims = {"gpus": 8, "sequence_tokens": 2048}
    each = ("tokens/s/GPU", "Tokens per GPU per second", "tok/s/device", "TGS", "tokens_per_sec_per_gpu", "Tok/s/GPU")
    every = ("tokens per second", "tokens/sec", "throughput (tokens/s)", "tps", "tok/s", "wps")
    for label, value in [(label, 6790.3) for label in each] + [(label, 8 * 6790.3) for label in every]:
        assert column(parse(rated(label, value), **claims), "step_seconds")[5] == pytest.approx(128 * 2048 / 8 / 6790.3)
    timed = rated("elapsed time per iteration (ms)", 4825.5, **{"tokens per second": "94322.4"})
    with pytest.raises(ConfigError, match="step 7 has 11,790 tokens/s/GPU, and its batch"):
        run_from(timed, "llama-3.1-8b", accelerator="H100 SXM", **claims)


def test_a_share_of_memory_in_use_and_an_unlikely_sequence_length_are_told():
    lines = rated("tokens/s/GPU", 6790.3, **{"mem usages": "0.5462", "throughput per GPU (TFLOP/s/GPU)": "540.1"})
    notes = run_from(lines, "llama-3.1-8b", accelerator="H100 SXM", gpus=8).notes
    assert any("54.6 % of the memory of one device" in note for note in notes)
    assert any("79.5 GFLOP a token" in note and "give --sequence-length" in note for note in notes)
