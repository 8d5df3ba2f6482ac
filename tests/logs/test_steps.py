"""Which steps of a log count, with which time: repeated lines, restarts, other configurations, means with start-up."""

import pytest
from a_log import collect, column, dumped, iterations, lines_of, parse

MESH = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1, etp=1"
FLOAT8 = "Float8 tensorwise scaled training active"
TITAN_STEP = (
    "[rank{}]:[titan] 2026-02-24 19:46:17,508 - root - INFO - step: {:2}  loss: {:8.5f}  memory: 66.91GiB(37.51%)  tps: {:,}"
)


def test_doubled_lines_count_once_in_any_order():
    lines = lines_of("primus_core_head")[1:]
    copy = [line.replace("utils.py:429", "utils.py:425") for line in lines]
    one, two, three, four = zip(lines, copy, strict=True)
    contents = collect([*one, two[0], three[0], two[1], three[1], *four])
    assert (list(contents.steps), contents.restarts) == ([1, 2, 3, 4], 0)


def test_a_run_that_starts_again_replaces_what_it_repeats():
    lines = lines_of("megatron_lm")
    again = [line.replace("755.3", "777.0").replace("30497.4", "30597.4") for line in lines]
    result = parse(lines[:-3] + again)
    assert (column(result, "step"), result.steps[3].step_seconds) == ([1, 2, 3, 4, 5, 6], 0.777)
    assert any("2 attempts" in note for note in result.notes)


def test_older_megatron_lm_resets_after_the_first_line_and_is_not_corrected():
    result = parse(lines_of("megatron_lm_interval10"))
    assert column(result, "step_seconds") == pytest.approx([1.0105, 1.0081, 1.0129])
    assert any("one line for 10 steps" in note for note in result.notes)
    assert "left out, since it is a mean with start-up: step 10" in result.notes


@pytest.mark.parametrize(
    ("first", "printed", "seconds"),
    [
        (1, (15.0, 0.7524, 0.75), [15.0, 0.7524, 0.75]),  # that cannot be a mean
        (1, (33.687, 21.7617), [33.687]),  # without a third line
        (500, (89.2, 88.5, 87.9), [89.2, 88.5, 87.9]),  # a log that is cut
        (500, (89.2, 88.5), [89.2, 88.5]),
        (1203, (5.623, 5.534, 5.48), [5.623, 5.534, 5.48]),
        (42, (9.0, 5.534, 5.48), [5.534, 5.48]),
        (501, (30.0, 17.75, 5.48), [5.5, 5.48]),  # a process that was resumed
    ],
)
def test_the_second_line_of_a_process_may_be_a_mean_with_its_first(first, printed, seconds):
    assert column(parse(iterations(first, printed, 2000)), "step_seconds") == pytest.approx(seconds)


def test_a_first_iteration_line_before_an_interval_is_taken_out_of_the_mean():
    lines = [line for first, second in ((1, 10), (10, 1.9), (20, 1), (30, 1)) for line in iterations(first, [second])]
    assert column(parse(lines), "step_seconds") == [10.0, 1.0, 1.0, 1.0]


def test_a_restart_within_a_log_has_a_mean_of_its_own():
    result = parse(iterations(1, [20.0, 12.75, 5.5, 5.51, 5.49]) + iterations(4, [30.0, 17.75, 5.48, 5.49]))
    assert column(result, "step_seconds") == [20.0, 5.5, 5.5, 5.5, 5.48, 5.49]
    assert "left out, since a process started again in it: step 4" in result.notes


def test_a_process_that_goes_on_where_the_last_one_ended_has_a_start_up_as_well():
    arguments = dumped(world_size=8, seq_length=4096)
    result = parse(arguments + iterations(1, [30.0] + [6.0] * 29) + arguments + iterations(31, [90.0, 48.0] + [6.0] * 28))
    assert column(result, "step_seconds") == [30.0] + [6.0] * 58
    assert "left out, since a process started again in it: step 31" in result.notes


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        ({"world_size": 8}, {"world_size": 4}, "world_size 8, then 4"),
        ({"world_size": 8, "num_layers": 32}, {"world_size": 8, "num_layers": 28}, "num_layers 32, then 28"),
    ],
)
def test_steps_of_an_earlier_process_with_another_configuration_are_left_out(one, other, changed):
    lines = dumped(**one) + iterations(1, [30.0] + [6.0] * 29) + dumped(**other) + iterations(31, [90.0] + [12.0] * 29)
    result = parse(lines)
    assert (column(result, "step"), column(result, "step_seconds")) == (list(range(32, 61)), [12.0] * 29)
    assert any("steps from 1 to 30 are left out" in note and changed in note for note in result.notes)


def test_a_run_that_goes_on_with_other_gpus_without_saying_so_is_that_one_alone():
    text = "[rank-{}/{}][INFO] iteration {:8d}/ 30 | elapsed time per iteration (ms): {:.1f}/{:.1f} | lm loss: 2.0 |"
    lines = [text.format(7, 8, number, 12_500, 12_500) for number in range(1, 11)]
    lines += [text.format(15, 16, number, 6_250, 6_250) for number in range(11, 31)]
    result = parse(lines)
    assert (column(result, "step"), result.evidence.world_size) == (list(range(12, 31)), 16)
    assert any("world_size 8, then 16" in note for note in result.notes)


WIDE = '"mixed_precision_param": "bfloat16",'


@pytest.mark.parametrize(
    ("first", "second", "changed", "dtype"),
    [
        ([WIDE, FLOAT8], [WIDE], "matmul_dtype fp8, then bf16", "bf16"),
        ([WIDE], [WIDE, FLOAT8], "matmul_dtype bf16, then fp8", "fp8"),
        ([FLOAT8], [], "matmul_dtype fp8, then not stated", None),
        (
            [FLOAT8, "CUDA capacity: H200 with 139.80GiB memory"],
            ["CUDA capacity: B200 with 178GiB memory", FLOAT8],
            "H200, ",
            "fp8",
        ),
    ],
)
def test_a_run_that_goes_on_in_another_dtype_or_on_another_gpu_is_that_one_alone(first, second, changed, dtype):
    lines = [MESH, *first, *(TITAN_STEP.format(0, number, 9.5, 8000) for number in range(1, 11))]
    lines += [MESH, *second, *(TITAN_STEP.format(0, number, 9.5, 6000) for number in range(11, 31))]
    result = parse(lines, global_batch_sequences=64, sequence_tokens=8192)
    assert (column(result, "step"), result.evidence.workload.matmul_dtype) == (list(range(12, 31)), dtype)
    assert any("steps from 1 to 10 are left out" in note and changed in note for note in result.notes)


def test_the_same_step_from_several_ranks_is_no_restart():
    rates = ((1, 900), (2, 10_050), (3, 10_007), (4, 10_010))
    lines = [MESH, *(TITAN_STEP.format(rank, step, 9 - step / 8, rate - rank) for step, rate in rates for rank in range(8))]
    assert collect(lines).restarts == 0
    result = parse(lines, global_batch_sequences=16, sequence_tokens=8192)
    assert column(result, "step") == [1, 2, 3, 4]
    assert result.steps[1].step_seconds == pytest.approx(16 * 8192 / (10_050 * 8))


@pytest.mark.parametrize("says_settings", [True, False])
def test_a_second_attempt_of_a_framework_that_prints_rates_replaces_the_first(says_settings):
    first = [TITAN_STEP.format(0, step, 9 - step / 8, 5_000 + step) for step in (1, 10, 20)]
    second = [TITAN_STEP.format(0, step, 8.5 - step / 8, 7_000 + step) for step in (1, 10, 20, 30)]
    lines = [MESH, *first, *([MESH] if says_settings else []), *second]
    result = parse(lines, global_batch_sequences=16, sequence_tokens=8192)
    assert collect(lines).restarts == 1
    assert column(result, "step_seconds") == pytest.approx([16 * 8192 / (rate * 8) for rate in (7001, 7010, 7020, 7030)])
    assert any("one line for 10 steps" in note for note in result.notes)
    assert not any("missing" in note for note in result.notes)


def test_the_rates_of_one_attempt_do_not_meet_the_batch_of_another():
    batch = "Trainer is initialized with local batch size 2, global batch size {}, gradient accumulation steps 1, "
    batch += "sequence length 8192, total steps 20 (warmup 5)"
    lines = [[TITAN_STEP.format(0, step, 8.0, rate) for step in (1, 10, 20)] for rate in (5_000, 6_000)]
    result = parse([MESH, batch.format(16), *lines[0], MESH, batch.format(32), *lines[1]])
    assert column(result, "step_seconds") == pytest.approx([32 * 8192 / (6_000 * 8)] * 3)
    assert any("global_batch_sequences 16, then 32" in note for note in result.notes)
