"""What the lines of each format mean, asserted on logs that name the origin of their wording."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from plans import request_of

from tprimat.config.load import load_config, read_config
from tprimat.core.errors import ConfigError, RecordError
from tprimat.logs.claims import Flags
from tprimat.logs.extract import evidence_of, extract, parsed_log, sequence_from_rates
from tprimat.logs.parse import DIALECTS, NAMES, LogReading, dialect_of, find_dialect
from tprimat.logs.steps import LogContents, Workload
from tprimat.plan.build import build_plan
from tprimat.records.schema import LogSource, StepRecord
from tprimat.train.step_log import iteration_line

LOGS = Path(__file__).parent
GIB = 2**30
CORE = ("core_v26_2", "core_v26_4_0", "core_v26_5_0", "core_v26_5_1", "core_head")
LEGACY = ("legacy_ratio", "legacy_gb", "legacy_gib")


def lines_of(name):
    return (LOGS / f"{name}.log").read_text(encoding="utf8").splitlines()


def collect(lines, dialect):
    reading = LogReading(name="a log", requested_dialect=dialect)
    reading.add(list(lines))
    return reading.contents


def read(name, dialect, **workload):
    return parsed_log(collect(lines_of(name), dialect), Workload(**workload))


def column(result, name):
    return [getattr(step, name) for step in result.steps]


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_every_log_says_where_it_comes_from(path):
    assert path.read_text(encoding="utf8").startswith(("# Constructed: ", "# Recorded: "))


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_the_dialect_is_recognised(path):
    wanted = max((name for name in NAMES if path.stem.replace("_", "-").startswith(name)), key=len)
    reading = LogReading(name="a log")
    reading.add(lines_of(path.stem))
    assert reading.dialect.name == wanted


def test_every_dialect_has_a_log():
    stems = [path.stem.replace("_", "-") for path in LOGS.glob("*.log")]
    assert not [name for name in NAMES if not any(stem.startswith(name) for stem in stems)]


def test_a_log_of_nothing_known_names_what_was_looked_for():
    reading = LogReading(name="x.log")
    reading.add(["hello", "Traceback (most recent call last):"])
    with pytest.raises(RecordError) as caught:
        reading.check(None)
    assert all(dialect.name in str(caught.value) for dialect in DIALECTS)


def test_an_unknown_dialect_names_the_known_ones():
    with pytest.raises(ConfigError, match="no log dialect 'jax'"):
        find_dialect("jax")


def test_what_our_own_line_says_is_read_back():
    steps = [
        StepRecord(step=1, step_seconds=27.875, tokens=262144, loss=11.25, grad_norm=23.125, learning_rate=1e-5),
        StepRecord(step=2, step_seconds=4.125, tokens=262144, finite=False, learning_rate=2e-5),
        StepRecord(step=3, step_seconds=4.0625, tokens=262144, peak_allocated_bytes=67890123456, peak_reserved_bytes=7 * GIB),
        StepRecord(step=4, step_seconds=4.03, tokens=262144, peak_allocated_bytes=67890123457, peak_reserved_bytes=7 * GIB),
    ]
    plan = build_plan(read_config(environment={}), request_of("llama", "truly_identical"))
    lines = [iteration_line(plan, step, datetime(2026, 1, 2, 3, 4, 5)) for step in steps]
    assert lines[0].startswith(
        " [tprimat 2026-01-02 03:04:05.000000] iteration        1/      50 | consumed samples:          128 | "
    )
    assert " | throughput per GPU (TFLOP/s/GPU): 54.825 | learning rate: 1.000000E-05 | global batch size:   128 | " in lines[0]
    result = parsed_log(collect(lines, "tprimat"), Workload(sequence_tokens=2048))
    assert list(result.steps) == steps


@pytest.mark.parametrize("version", CORE)
def test_primus_core_lines(version):
    result = read(f"primus_{version}", "primus", gpus=8, sequence_tokens=8192)
    assert column(result, "step") == [1, 2, 3, 4]
    assert column(result, "step_seconds") == pytest.approx([33.687, 2 * 21.7617 - 33.687, 9.8363, 9.7024])
    assert column(result, "loss") == pytest.approx([11.89761, 2 * 11.897 - 11.89761, 11.31, 10.9])
    assert column(result, "learning_rate") == [5e-6, 1e-5, 9.99e-6, 9.9e-6]
    assert column(result, "grad_norm") == [7.499, 7.412, 6.9, 5.1]
    assert column(result, "tokens") == [128 * 8192] * 4
    assert column(result, "peak_allocated_bytes") == [None] * 4
    assert result.evidence.world_size == 8
    assert result.evidence.global_batch_sequences == 128
    assert any("mean with step 1" in note for note in result.notes)


@pytest.mark.parametrize("version", LEGACY)
def test_primus_legacy_lines_print_the_time_of_each_step_first(version):
    result = read(f"primus_{version}", "primus", gpus=8)
    assert column(result, "step_seconds") == pytest.approx([9.8363, 9.7024])
    assert column(result, "tokens") == [None, None]


@pytest.mark.parametrize(("version", "used"), [("core_v26_2", 117.98), ("legacy_gb", 117.99), ("legacy_gib", 117.99)])
def test_primus_gb_are_gib(version, used):
    contents = collect(lines_of(f"primus_{version}"), "primus")
    assert contents.device_used_bytes == round(used * GIB)


@pytest.mark.parametrize("version", CORE + LEGACY)
def test_primus_lines_tell_the_sequence_length_by_their_rates(version):
    assert sequence_from_rates(collect(lines_of(f"primus_{version}"), "primus"), 8) == 8192


def test_rates_with_few_digits_do_not_pass_for_a_sequence_length():
    assert sequence_from_rates(collect(lines_of("nanotron"), "nanotron"), 8) is None


def test_doubled_lines_count_once_in_any_order():
    lines = lines_of("primus_core_head")[1:]
    copy = [line.replace("utils.py:429", "utils.py:425") for line in lines]
    one, two, three, four = zip(lines, copy, strict=True)
    contents = collect([*one, two[0], three[0], two[1], three[1], *four], "primus")
    assert list(contents.steps) == [1, 2, 3, 4]
    assert contents.restarts == 0


def test_a_run_that_starts_again_replaces_what_it_repeats():
    lines = lines_of("megatron_lm")
    again = [line.replace("755.3", "777.0").replace("30497.4", "30597.4") for line in lines]
    result = parsed_log(collect(lines[:-3] + again, "megatron-lm"), Workload())
    assert column(result, "step") == [1, 2, 3, 4, 5, 6]
    assert result.steps[3].step_seconds == 0.777
    assert any("2 attempts" in note for note in result.notes)


def test_primus_module_configuration_and_success():
    prefix = (
        "[\x1b[32m20260822 07:39:10\x1b[0m][\x1b[36mrank-0/8\x1b[0m]\x1b[1m[INFO ]    \x1b[0m\x1b[1m[--module_utils.py:227] : "
    )
    rows = [
        "tensor_model_parallel_size     : 4 (int)",
        "fp8      : hybrid (str)",
        "bf16    : True (bool)",
        "train_iters  : 50 (int)",
    ]
    contents = collect([f"{prefix}  {row}\x1b[0m" for row in rows] + ["Training completed."], "primus")
    assert contents.evidence == {"tensor_parallel": 4, "fp8": True, "matmul_dtype": "bf16"}
    assert parsed_log(contents, Workload()).evidence.matmul_dtype == "fp8"
    assert contents.total_steps == 50
    assert contents.finished


def test_primus_argument_dump_behind_its_prefix():
    contents = collect(
        ["[x][rank-7/8][INFO] [---arguments.py:1576] :   tensor_model_parallel_size ...................... 2"], "primus"
    )
    assert contents.evidence == {"tensor_parallel": 2}


def test_megatron_lm():
    result = read("megatron_lm", "megatron-lm", gpus=4, sequence_tokens=4096)
    assert column(result, "step_seconds") == pytest.approx([30.4974, 0.752, 0.7601, 0.7553, 0.758, 0.7519])
    assert column(result, "finite") == [True, True, True, True, False, True]
    assert column(result, "grad_norm") == [7.5, 7.1, 6.0, 5.5, None, 5.0]
    assert result.steps[1].loss == pytest.approx(11.87)
    assert column(result, "peak_allocated_bytes") == [None] + [round(40970.5 * 2**20)] * 5
    assert column(result, "peak_reserved_bytes")[1] == 45056 * 2**20
    proof = result.evidence
    assert (proof.world_size, proof.tensor_parallel, proof.pipeline_parallel, proof.data_parallel) == (4, 2, 1, 2)
    assert (proof.micro_batch_sequences, proof.global_batch_sequences, proof.sequence_tokens) == (2, 64, 4096)
    assert (proof.matmul_dtype, proof.parameter_dtype, proof.transformer_engine) == ("bf16", "bfloat16", True)
    assert (proof.sequence_parallel, proof.data, proof.optimizer, proof.virtual_pipeline) == (True, "mock", "adam", None)
    assert proof.parameters is None, "a rank's share under tensor parallelism is not the model's count"
    assert proof.tokens_per_step == 64 * 4096


def test_megatron_lm_of_2021_has_its_model_and_loss_in_other_words():
    contents = collect(lines_of("megatron_lm_2021"), "auto")
    result = parsed_log(contents, Workload())
    assert column(result, "step_seconds") == [159.7789, 141.0968, 137.1384, 138.9289]
    assert column(result, "loss") == [12.44238, 12.44502, 41.03157, 43.05696]
    assert result.steps[0].peak_allocated_bytes == round(19961.072265625 * 2**20)
    proof = result.evidence
    assert (proof.world_size, proof.tensor_parallel, proof.pipeline_parallel, proof.data_parallel) == (64, 4, 16, 1)
    assert (proof.matmul_dtype, proof.recompute, proof.sequence_tokens) == ("fp16", "full", 1024)


def test_megatron_lm_before_2021_prints_memory_without_brackets_and_a_loss_without_a_colon():
    lines = [
        " iteration        5/  120000 | elapsed time per iteration (ms): 16491.5 | learning rate 1.000E-04 | lm loss 9.1E+00 |",
        "after 5 iterations memory (MB) | allocated: 10250.5 | max allocated: 12606.06 | max reserved: 17482.0",
        " iteration       10/  120000 | elapsed time per iteration (ms): 1993.9 | learning rate 1.500E-04 | lm loss 8.5E+00 |",
    ]
    result = parsed_log(collect(lines, "auto"), Workload())
    assert column(result, "step_seconds") == pytest.approx([1.9939])
    assert (result.steps[0].loss, result.steps[0].learning_rate) == (8.5, 1.5e-4)
    assert result.steps[0].peak_allocated_bytes == round(12606.06 * 2**20), "although the line of its step is left out"


def test_bloom_printed_its_times_in_seconds():
    result = read("megatron_lm_bloom", "auto", gpus=384)
    assert column(result, "step_seconds") == [106.46, 105.9, 106.4, 106.33]
    assert column(result, "tokens") == [2048 * 2048] * 4, "the sequence length follows from the consumed tokens and samples"
    assert column(result, "grad_norm") == [0.242, 0.947, 2.390, 15.886]
    assert result.steps[0].loss == 2.198845


def test_megatron_deepspeed_prints_its_sequence_length_and_rate():
    line = " iteration        5/      10 | consumed samples:         7680 | elapsed time per iteration (ms): 344656.1 | "
    line += "global batch size:  1536 | lm loss: 1.1E+01 | actual seqlen:  2048 | samples per second: 4.457 | "
    line += "tokens per gpu per second (tgs): 142.612 | TFLOPs: 153.38 |"
    contents = collect([line], "auto")
    assert contents.evidence["sequence_tokens"] == 2048
    assert (contents.steps[5].tokens_per_second_per_gpu, contents.steps[5].step_seconds) == (142.612, 344.6561)


CURRICULUM = {"each step's length": " actual seqlen: {length} |", "the counts of all steps": " consumed tokens: {tokens} |"}


@pytest.mark.parametrize("words", CURRICULUM.values(), ids=CURRICULUM)
def test_shorter_sequences_of_curriculum_learning_are_left_out(words):
    line = " iteration {step}/ 20 | consumed samples: {samples} |" + words + " elapsed time per iteration (ms): {ms} | "
    line += "global batch size: 128 | lm loss: 1.1E+01 | tokens per gpu per second (tgs): {rate} |"
    lines, tokens = ["using world size: 8"], 0
    for step in range(1, 21):
        length, ms = (512, 1000.0) if step <= 12 else (2048, 4000.0)
        tokens += 128 * length
        lines.append(
            line.format(step=step, samples=128 * step, length=length, tokens=tokens, ms=ms, rate=128 * length / ms * 125)
        )
    flags = Flags(model="llama", gpus=8, accelerator="H100 SXM")
    reading = LogReading(name="a log")
    reading.add(lines)
    run = extract(reading, flags, LogSource(path="a log"), load_config())
    assert (column(run, "step"), run.run.sequence_tokens) == (list(range(13, 21)), 2048)
    assert column(run, "tokens") == [128 * 2048] * 8
    assert any("from 512 to 2048 tokens" in note for note in run.notes)


def test_ms_swift_prints_the_reserved_memory_with_the_iteration():
    line = " [2026-03-03 16:38:36] iteration        2/     624 | elapsed time per iteration (ms): 3988.6 | "
    line += "memory(GiB): 83.46 | elapsed time: 3m 8s | remaining time: 16h 12m 43s | loss: 1.529132E-02 | grad norm: 75.173 |"
    result = parsed_log(collect([line], "auto"), Workload())
    assert (result.steps[0].loss, result.steps[0].peak_reserved_bytes) == (0.01529132, round(83.46 * GIB))


def test_gpt_neox_states_its_gpus_and_degrees():
    rows = {"global_num_gpus": 8, "model_parallel_size": 2, "pipe_parallel_size": 0, "world_size": None}
    lines = [f"  {name} ........ {value}........................default" for name, value in rows.items()]
    evidence = collect(lines, "deepspeed").evidence
    assert evidence == {"world_size": 8, "tensor_parallel": 2, "pipeline_parallel": 1}


def test_megatron_lm_without_splits_counts_parameters():
    lines = ["using world size: 2, data-parallel size: 2, tensor-model-parallel size: 1, pipeline-model-parallel size: 1"]
    for names, ranks in (("tensor, pipeline", "0, 0"), ("tensor, gtp_remat, pipeline", "0, 0, 0")):  # since core 0.19
        line = f" > number of parameters on ({names}) model parallel rank ({ranks}): 8030261248"
        assert parsed_log(collect([*lines, line], "megatron-lm"), Workload()).evidence.parameters == 8030261248


def test_older_megatron_lm_resets_after_the_first_line_and_is_not_corrected():
    result = read("megatron_lm_interval10", "megatron-lm")
    assert column(result, "step_seconds") == pytest.approx([1.0105, 1.0081, 1.0129])
    assert any("one line for 10 steps" in note for note in result.notes)
    assert "left out, since it is a mean with start-up: step 10" in result.notes


def test_a_second_line_that_cannot_be_a_mean_stands():
    lines = [line.replace("15624.7", "752.4") for line in lines_of("megatron_lm")]
    assert parsed_log(collect(lines, "megatron-lm"), Workload()).steps[1].step_seconds == 0.7524


def test_a_second_line_without_a_third_is_left_out():
    result = parsed_log(collect(lines_of("primus_core_head")[:3], "primus"), Workload())
    assert column(result, "step") == [1]
    assert any("left out" in note for note in result.notes)


@pytest.mark.parametrize(
    ("first", "milliseconds"),
    [(500, (89_200.0, 88_500.0, 87_900.0)), (1203, (5623.0, 5534.0, 5480.0)), (42, (9000.0, 5534.0, 5480.0))],
)
def test_the_second_line_of_a_log_that_is_cut_stands(first, milliseconds):
    text = " iteration {:8d}/ 2000 | elapsed time per iteration (ms): {:.1f} | lm loss: 2.0 |"
    lines = [text.format(first + index, value) for index, value in enumerate(milliseconds)]
    shown = milliseconds[1:] if first == 42 else milliseconds
    assert column(parsed_log(collect(lines, "megatron-lm"), Workload()), "step_seconds") == [ms / 1000 for ms in shown]
    two = parsed_log(collect(lines[:2], "megatron-lm"), Workload())
    assert column(two, "step") == ([] if first == 42 else [first, first + 1])


def test_the_second_line_of_a_resumed_process_is_a_mean_with_its_start():
    text = " iteration {:8d}/ 2000 | elapsed time per iteration (ms): {:.1f} | lm loss: 2.0 |"
    lines = [text.format(501, 30_000.0), text.format(502, 17_750.0), text.format(503, 5480.0)]
    assert column(parsed_log(collect(lines, "megatron-lm"), Workload()), "step_seconds") == [5.5, 5.48]


def test_a_restart_within_a_log_has_a_mean_of_its_own():
    text = " iteration {:8d}/ 2000 | elapsed time per iteration (ms): {:.1f} | lm loss: 2.0 |"
    first = [(1, 20_000.0), (2, 12_750.0), (3, 5500.0), (4, 5510.0), (5, 5490.0)]
    again = [(4, 30_000.0), (5, 17_750.0), (6, 5480.0), (7, 5490.0)]
    result = parsed_log(collect([text.format(*values) for values in first + again], "megatron-lm"), Workload())
    assert column(result, "step_seconds") == [20.0, 5.5, 5.5, 5.5, 5.48, 5.49]
    assert "left out, since a process started again in it: step 4" in result.notes


def dumped(**settings):
    """A dump of arguments."""
    rows = [f"  {name} ........ {value}" for name, value in settings.items()]
    return ["------------------------ arguments ------------------------", *rows, "-------------------- end of arguments -----"]


def iterations(first, seconds):
    text = " iteration {:8d}/ 60 | elapsed time per iteration (ms): {:.1f} | global batch size: 128 | lm loss: 2.0 |"
    return [text.format(number, second * 1e3) for number, second in enumerate(seconds, first)]


def test_a_process_that_goes_on_where_the_last_one_ended_has_a_start_up_as_well():
    arguments = {"world_size": 8, "seq_length": 4096}
    lines = dumped(**arguments) + iterations(1, [30.0] + [6.0] * 29) + dumped(**arguments)
    lines += iterations(31, [90.0, 48.0] + [6.0] * 28)
    result = parsed_log(collect(lines, "megatron-lm"), Workload())
    assert column(result, "step_seconds") == [30.0] + [6.0] * 58
    assert "left out, since a process started again in it: step 31" in result.notes


def test_steps_of_an_earlier_process_with_another_configuration_are_left_out():
    lines = dumped(world_size=8) + iterations(1, [30.0] + [6.0] * 29)
    lines += dumped(world_size=4) + iterations(31, [90.0] + [12.0] * 29)
    result = parsed_log(collect(lines, "megatron-lm"), Workload())
    assert (column(result, "step"), column(result, "step_seconds")) == (list(range(32, 61)), [12.0] * 29)
    assert any("steps from 1 to 30 are left out" in note and "world_size 8, then 4" in note for note in result.notes)


def test_steps_of_an_earlier_process_with_another_model_are_left_out():
    lines = dumped(world_size=8, num_layers=32) + iterations(1, [30.0] + [6.0] * 29)
    lines += dumped(world_size=8, num_layers=28) + iterations(31, [90.0] + [5.9] * 29)
    result = parsed_log(collect(lines, "megatron-lm"), Workload())
    assert column(result, "step") == list(range(32, 61))
    assert any("num_layers 32, then 28" in note for note in result.notes)


def test_a_run_that_goes_on_with_other_gpus_without_saying_so_is_that_one_alone():
    text = "[rank-{}/{}][INFO] iteration {:8d}/ 30 | elapsed time per iteration (ms): {:.1f}/{:.1f} | lm loss: 2.0 |"
    lines = [text.format(7, 8, number, 12_500, 12_500) for number in range(1, 11)]
    lines += [text.format(15, 16, number, 6_250, 6_250) for number in range(11, 31)]
    result = parsed_log(collect(lines, "primus"), Workload())
    assert (column(result, "step"), result.evidence.world_size) == (list(range(12, 31)), 16)
    assert any("world_size 8, then 16" in note for note in result.notes)


MESH = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1, etp=1"
FLOAT8 = "Float8 tensorwise scaled training active"


@pytest.mark.parametrize(
    ("first", "second", "changed", "dtype"),
    [
        ([FLOAT8], [], "matmul_dtype fp8, then bf16", "bf16"),
        ([], [FLOAT8], "matmul_dtype bf16, then fp8", "fp8"),
        (
            [FLOAT8, "CUDA capacity: H200 with 139.80GiB memory"],
            ["CUDA capacity: B200 with 178GiB memory", FLOAT8],
            "H200, ",
            "fp8",
        ),
    ],
)
def test_a_run_that_goes_on_in_another_dtype_or_on_another_gpu_is_that_one_alone(first, second, changed, dtype):
    wide, text = '"mixed_precision_param": "bfloat16",', "step: {:2}  loss: 9.5  memory: 48.87GiB(51.44%)  tps: {:,}"
    lines = [wide, MESH, *first, *(text.format(number, 8000) for number in range(1, 11))]
    lines += [wide, MESH, *second, *(text.format(number, 6000) for number in range(11, 31))]
    result = parsed_log(collect(lines, "torchtitan"), Workload(global_batch_sequences=64, sequence_tokens=8192))
    assert (column(result, "step"), result.evidence.matmul_dtype) == (list(range(12, 31)), dtype)
    assert any("steps from 1 to 10 are left out" in note and changed in note for note in result.notes)


def test_a_later_process_that_prints_no_dtype_does_not_inherit_fp8():
    text = "step: {:2}  loss: 9.5  memory: 48.87GiB(51.44%)  tps: {:,}"
    lines = [MESH, FLOAT8, *(text.format(number, 8000) for number in range(1, 11))]
    lines += [MESH, *(text.format(number, 6000) for number in range(11, 31))]
    result = parsed_log(collect(lines, "torchtitan"), Workload(global_batch_sequences=64, sequence_tokens=8192))
    assert (column(result, "step"), result.evidence.matmul_dtype) == (list(range(12, 31)), None)
    assert any("steps from 1 to 10 are left out" in note and "matmul_dtype fp8, then not stated" in note for note in result.notes)


@pytest.mark.parametrize(
    ("name", "line", "dtype"),
    [
        ("megatron-lm", "  fp4 ........ e2m1", "fp4"),
        ("megatron-lm", "  fp4 ........ None", "bf16"),
        ("megatron-lm", "  fp8_hybrid ........ True", "fp8"),
        ("megatron-lm", "  fp8_e4m3 ........ False", "bf16"),
        ("torchtitan", "INFO - MX training active with recipe mxfp8_cublas", "fp8"),
        ("torchtitan", "INFO - MX training active with recipe mxfp4_cutlass", "fp4"),
        ("torchtitan", "[rank-0/8][INFO] : Swapped to MXLinear layers", "fp8"),
        ("megatron-lm", "  fp4 ........ mxfp4", "fp4"),
        ("maxtext", "Config param quantization: int8", "int8"),
        ("maxtext", "Config param quantization: fp8_full", "fp8"),
        ("maxtext", "Config param quantization: intmp", "intmp"),
    ],
)
def test_narrow_dtypes_are_not_called_bf16(name, line, dtype):
    wide = {"torchtitan": '"mixed_precision_param": "bfloat16"', "maxtext": "Config param dtype: bfloat16"}
    lines = [wide.get(name, "  bf16 ........ True"), line]
    assert evidence_of(collect(lines, name))[0].matmul_dtype == dtype


def test_a_first_iteration_line_before_an_interval_is_taken_out_of_the_mean():
    text = " iteration {:8d}/ 40 | elapsed time per iteration (ms): {:.1f} | lm loss: 9.0 |"
    lines = [text.format(1, 10000.0), text.format(10, 1900.0), text.format(20, 1000.0), text.format(30, 1000.0)]
    result = parsed_log(collect(lines, "megatron-lm"), Workload())
    assert column(result, "step_seconds") == [10.0, 1.0, 1.0, 1.0]


def test_fp8_without_transformer_engine_is_no_fp8():
    rows = ["  bf16 ..................... True", "  fp8 ....................... hybrid", "  transformer_impl ........ local"]
    result = parsed_log(collect(rows, "megatron-lm"), Workload())
    assert result.evidence.matmul_dtype is None
    assert any("ignores" in note for note in result.notes)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ((), (None, None, None)),
        (("fp8_recipe ............. tensorwise", "fp8_dot_product_attention ... False"), ("current", None, None)),
        (("fp8_recipe ............. delayed", "fp8_multi_head_attention .... True"), ("delayed", "fp8", None)),
        (("num_layers_at_start_in_bf16 ... 1", "first_last_layers_bf16 ...... False"), (None, None, 0)),
        (
            (
                "first_last_layers_bf16 ...... True",
                "num_layers_at_start_in_bf16 ... 0",
                "num_layers_at_end_in_bf16 ..... 2",
            ),
            (None, None, 2),
        ),
    ],
)
def test_megatron_s_arguments_tell_what_fp8_is(rows, found):
    def details(*switches):
        evidence = evidence_of(collect([f"  {row}" for row in (*switches, *rows)], "megatron-lm"))[0]
        return evidence.fp8_scaling, evidence.attention_dtype, evidence.layers_in_bf16

    assert details("bf16 ........ True", "fp8 ........ hybrid") == found
    assert details("bf16 ........ True", "fp8 ........ None") == (None, None, None)


def test_megatron_bridge():
    result = read("megatron_bridge", "megatron-bridge", sequence_tokens=8192)
    assert column(result, "step_seconds") == pytest.approx([105.7958, 7.1476, 7.154, 7.1783])
    assert result.steps[3].peak_allocated_bytes == 153_470_000_000
    proof = result.evidence
    assert (proof.context_parallel, proof.tensor_parallel, proof.matmul_dtype, proof.sequence_tokens) == (2, 1, "fp8", 8192)


def test_megatron_bridge_of_2025():
    result = read("megatron_bridge_2025", "auto")
    assert (column(result, "step"), column(result, "step_seconds")) == ([20], [pytest.approx(14.2603)])
    assert result.steps[0].peak_allocated_bytes == round(12712.43603515625 * 2**20)
    assert collect(lines_of("megatron_bridge_2025"), "auto").steps[20].tflops_per_gpu == 58.2


def test_megatron_bridge_behind_the_prefixes_of_its_launcher():
    contents = collect(lines_of("megatron_bridge_nemo_run"), "auto")
    assert column(parsed_log(contents, Workload()), "step_seconds") == pytest.approx([30.089, 9.089, 9.1])
    assert [step.tflops_per_gpu for step in contents.steps.values()] == [200.5, 663.5, 662.8]
    shape = {"hidden_size": "4096", "num_attention_heads": "32", "num_layers": "32", "ffn_hidden_size": "14336"}
    assert contents.arguments == shape, "without those of the nested model, which stand further to the right"


@pytest.mark.parametrize("cut", range(1, 5))
def test_megatron_bridge_is_recognised_in_whatever_order_its_ranks_print(cut):
    lines = ["  num_layers: 32", "  hidden_size: 4096", *lines_of("megatron_bridge_2025")[1:]]
    reading = LogReading(name="a log")
    reading.add(lines[:cut])
    reading.add(lines[cut:])
    assert (reading.dialect.name, list(reading.contents.steps)) == ("megatron-bridge", [10, 20])
    assert reading.contents.arguments == {"num_layers": "32", "hidden_size": "4096"}


WRAPPERS = {
    "kubectl": "[pod/train-0/pytorch] {}",
    "kubectl with times": "[pod/train-0/pytorch] 2026-01-01T10:00:00.123456789Z {}",
    "a node of Kubernetes": "2026-01-01T10:00:00.123456789Z stdout F {}",
    "srun": "3: {}",
    "srun of ten tasks or more": " 3: {}",
    "srun and torchrun": "3: [default0]:{}",
    "pdsh": "node01: {}",
    "mpirun": "[1,0]<stdout>:{}",
    "docker compose": "trainer-1  | {}",
    "docker compose in colour": "\x1b[36mtrainer-1  | \x1b[0m{}",
    "Ray": "(TrainWorker pid=123, ip=10.0.0.1) {}",
    "SkyPilot": "(pretraining, pid=4112) {}",
    "Windows": "{}\r",
}


def in_json(line):
    return json.dumps({"log": line + "\n", "stream": "stdout", "time": "2026-01-01T10:00:00.123456789Z"})


@pytest.mark.parametrize("name", sorted({path.stem for path in LOGS.glob("*.log")} - {"tprimat", "megatron_bridge_nemo_run"}))
@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), in_json], ids=[*WRAPPERS, "Docker's JSON"])
def test_what_a_launcher_puts_around_a_line_changes_nothing(name, wrap):
    lines = [wrap(line) if callable(wrap) else wrap.format(line) for line in lines_of(name)[1:]]
    wrapped, plain = collect(lines, "auto"), collect(lines_of(name)[1:], "auto")
    assert repr(wrapped.steps) == repr(plain.steps), "with losses that are no numbers"
    assert (wrapped.evidence, wrapped.arguments) == (plain.evidence, plain.arguments)
    assert (wrapped.total_steps, wrapped.finished, wrapped.accelerator) == (plain.total_steps, plain.finished, plain.accelerator)


@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), in_json], ids=[*WRAPPERS, "Docker's JSON"])
def test_what_a_launcher_puts_around_the_shape_of_megatron_bridge_changes_nothing(wrap):
    lines = ["  num_layers: 32", "  vision:", "    num_layers: 24", "  swiglu: true", *lines_of("megatron_bridge_2025")[1:]]
    wrapped = [wrap(line) if callable(wrap) else wrap.format(line) for line in lines]
    assert collect(wrapped, "auto").arguments == {"num_layers": "32", "swiglu": "true"}


def test_a_torn_line_of_json_is_read_as_it_is():
    line = MEGATRON_DEEPSPEED.format(1)
    nested = '{"message":' + "[" * 100_000
    assert list(collect([nested, in_json(line)[:-30], '{"log": 5}', '{"log":'], "auto").steps) == [1]


def test_a_progress_bar_is_one_line_in_json():
    bars = [line for line in lines_of("nemo_1") if line.startswith("Epoch")]
    assert repr(collect([in_json("\r".join(bars))], "auto").steps) == repr(collect(bars, "auto").steps)


def test_the_progress_bar_of_nemo_1():
    contents = collect(lines_of("nemo_1"), "auto")
    result = parsed_log(contents, Workload(global_batch_sequences=2048))
    assert (column(result, "step"), column(result, "step_seconds")) == ([1, 2, 3, 4], [70.1, 49.6, 49.5, 49.7])
    assert (column(result, "loss"), column(result, "finite")) == ([11.8, 11.7, 11.5, None], [True, True, True, False])
    assert (contents.total_steps, contents.restarts, contents.evidence["world_size"]) == (15, 0, 8)
    assert [step.consumed_sequences for step in contents.steps.values()] == [2048, 4096, 6144, 8192]


def test_nemo_counts_steps_from_one_here():
    contents = collect(lines_of("nemo"), "nemo")
    result = parsed_log(contents, Workload(sequence_tokens=8192))
    assert column(result, "step") == [1, 2, 3, 4]
    assert column(result, "step_seconds") == [61.07, 9.441, 9.437, 9.44]
    assert result.steps[0].learning_rate == 1.5e-07
    assert result.steps[0].peak_allocated_bytes == 70833405952
    assert (contents.total_steps, contents.finished) == (4, True)
    proof = result.evidence
    assert (proof.world_size, proof.tensor_parallel, proof.pipeline_parallel, proof.context_parallel) == (8, 2, 2, 1)


def test_torchtitan_derives_times_from_the_rate_per_gpu():
    contents = collect(lines_of("torchtitan"), "torchtitan")
    result = parsed_log(contents, Workload(gpus=8, sequence_tokens=8192))
    assert column(result, "step") == [1, 10, 20, 30]
    assert column(result, "step_seconds") == pytest.approx([8 * 8192 / (rate * 8) for rate in (312, 4376, 4400, 4390)])
    assert column(result, "loss") == [12.2347, 11.8351, 10.5, 9.5]
    assert result.steps[1].peak_reserved_bytes == round(48.87 * GIB)
    assert (contents.accelerator, contents.total_steps, contents.finished) == ("NVIDIA H200", 30, True)
    proof = result.evidence
    assert (proof.world_size, proof.tensor_parallel, proof.data_parallel, proof.matmul_dtype) == (8, 2, 4, "fp8")
    assert (proof.sequence_tokens, proof.micro_batch_sequences, proof.global_batch_sequences) == (8192, 2, 8)


def test_torchtitan_0_2_names_its_degrees_and_its_precision():
    contents = collect(lines_of("torchtitan_0_2"), "torchtitan")
    result = parsed_log(contents, Workload())
    proof = result.evidence
    assert (proof.world_size, proof.tensor_parallel, proof.pipeline_parallel, proof.data_parallel) == (4, 2, 1, 2)
    assert (proof.matmul_dtype, proof.context_parallel, proof.micro_batch_sequences) == ("bf16", 1, 2)
    assert column(result, "step_seconds") == pytest.approx([8 * 2048 / (rate * 4) for rate in (312, 8192, 4096)])
    assert contents.finished


def test_torchtitan_in_primus_says_its_dtype_and_prints_each_step_on_every_rank():
    lines = lines_of("torchtitan_primus")
    result = parsed_log(collect(lines, "torchtitan"), Workload())
    proof = result.evidence
    assert (proof.world_size, proof.data_parallel, proof.matmul_dtype, proof.routing) == (8, 8, "fp8", None)
    assert column(result, "step_seconds") == pytest.approx([32 * 8192 / (rate * 8) for rate in (1100, 13004, 13010)], rel=2e-3)
    plain = [line for line in lines if "Swapped" not in line]
    assert evidence_of(collect(plain, "torchtitan"))[0].matmul_dtype == "bf16"
    resumed = evidence_of(collect([*lines, *(line.replace("total steps 3", "total steps 6") for line in plain)], "torchtitan"))
    assert resumed[0].matmul_dtype == "bf16", "a later process without Turbo's layers"


def test_layers_that_torchtitan_swaps_after_it_named_fp4_stay_fp4():
    lines = ["INFO - MX training active with recipe mxfp4_cutlass", "INFO - Swapped to MXLinear layers"]
    assert evidence_of(collect(lines, "torchtitan"))[0].matmul_dtype == "fp4"


def test_torchtitan_counts_a_batch_in_tokens_since_august_2026():
    contents = collect(lines_of("torchtitan_2026_08"), "torchtitan")
    result = parsed_log(contents, Workload())
    assert column(result, "step_seconds") == pytest.approx([16 * 8192 / (rate * 8) for rate in (1024, 8192, 8192)])
    proof = result.evidence
    assert (proof.world_size, proof.tensor_parallel, proof.data_parallel, proof.matmul_dtype) == (8, 2, 4, "fp8")
    assert (proof.micro_batch_sequences, proof.global_batch_sequences, proof.sequence_tokens) == (2, 16, 8192)
    assert contents.total_steps == 20


def test_a_batch_of_torchtitan_that_is_no_whole_number_of_sequences_is_unknown():
    line = "Trainer is initialized with 3000 tokens per DP rank, 12000 tokens per train step, gradient accumulation steps 1, "
    line += "maximum context length 8192, total steps 20 (warmup 2)"
    assert collect([line], "torchtitan").evidence == {"sequence_tokens": 8192}


TITAN_STEP = (
    "[rank{}]:[titan] 2026-02-24 19:46:17,508 - root - INFO - step: {:2}  loss: {:8.5f}  memory: 66.91GiB(37.51%)  tps: {:,}"
)


def test_the_same_step_from_several_ranks_is_no_restart():
    rates = ((1, 900), (2, 10_050), (3, 10_007), (4, 10_010))
    lines = [MESH, *(TITAN_STEP.format(rank, step, 9 - step / 8, rate - rank) for step, rate in rates for rank in range(8))]
    contents = collect(lines, "torchtitan")
    result = parsed_log(contents, Workload(global_batch_sequences=16, sequence_tokens=8192))
    assert (contents.restarts, column(result, "step")) == (0, [1, 2, 3, 4])
    assert result.steps[1].step_seconds == pytest.approx(16 * 8192 / (10_050 * 8))


@pytest.mark.parametrize("says_settings", [True, False])
def test_a_second_attempt_of_a_framework_that_prints_rates_replaces_the_first(says_settings):
    first = [TITAN_STEP.format(0, step, 9 - step / 8, 5_000 + step) for step in (1, 10, 20)]
    second = [TITAN_STEP.format(0, step, 8.5 - step / 8, 7_000 + step) for step in (1, 10, 20, 30)]
    contents = collect([MESH, *first, *([MESH] if says_settings else []), *second], "torchtitan")
    result = parsed_log(contents, Workload(global_batch_sequences=16, sequence_tokens=8192))
    assert contents.restarts == 1
    assert column(result, "step_seconds") == pytest.approx([16 * 8192 / (rate * 8) for rate in (7001, 7010, 7020, 7030)])
    assert any("one line for 10 steps" in note for note in result.notes)
    assert not any("missing" in note for note in result.notes)


def test_the_rates_of_one_attempt_do_not_meet_the_batch_of_another():
    batch = "Trainer is initialized with local batch size 2, global batch size {}, gradient accumulation steps 1, "
    batch += "sequence length 8192, total steps 20 (warmup 5)"
    lines = [[TITAN_STEP.format(0, step, 8.0, rate) for step in (1, 10, 20)] for rate in (5_000, 6_000)]
    contents = collect([MESH, batch.format(16), *lines[0], MESH, batch.format(32), *lines[1]], "torchtitan")
    result = parsed_log(contents, Workload())
    assert column(result, "step_seconds") == pytest.approx([32 * 8192 / (6_000 * 8)] * 3)
    assert any("global_batch_sequences 16, then 32" in note for note in result.notes)


def test_torchtitan_that_disables_mixed_precision_multiplies_in_fp32():
    contents = collect(['"mixed_precision_param": "bfloat16",', "INFO - Mixed precision training is disabled"], "torchtitan")
    assert contents.evidence["matmul_dtype"] == "fp32"


def test_torchtitan_without_a_known_batch_has_no_times():
    result = read("torchtitan_wps", "torchtitan", gpus=8)
    assert result.steps == ()
    assert "logged steps without a time, which are left out: 3" in result.notes


def test_torchtitan_of_2024_says_wps():
    result = read("torchtitan_wps", "torchtitan", gpus=8, global_batch_sequences=16, sequence_tokens=8192)
    assert result.steps[1].step_seconds == pytest.approx(16 * 8192 / (5762 * 8))


def test_torchtune():
    result = read("torchtune", "torchtune", gpus=2, global_batch_sequences=8, sequence_tokens=4096)
    assert column(result, "step_seconds") == pytest.approx([16.0, 4.0, 8 * 4096 / 8001])
    assert result.steps[0].learning_rate == 2e-07
    assert result.steps[0].peak_allocated_bytes == round(37.5 * GIB)


def test_nanotron_suffixes():
    result = read("nanotron", "nanotron", gpus=8)
    assert column(result, "step_seconds") == pytest.approx([8.42, 4.21, 0.987])
    assert result.steps[0].peak_reserved_bytes == 45_600_000_000
    proof = result.evidence
    assert (proof.data_parallel, proof.pipeline_parallel, proof.tensor_parallel) == (4, 1, 2)
    assert (proof.sequence_tokens, proof.micro_batch_sequences, proof.global_batch_sequences) == (4096, 2, 64)


def test_maxtext():
    result = read("maxtext", "maxtext", gpus=8, sequence_tokens=2048)
    assert column(result, "step") == [1, 3, 4]
    assert column(result, "step_seconds") == [44.923, 5.658, 5.667]
    assert any("the host ran ahead of the device: step 2" in note for note in result.notes)
    assert result.evidence.tokens_per_step == 24 * 2048
    assert (result.evidence.world_size, result.evidence.matmul_dtype) == (8, "bf16")


def test_deepspeed_reads_the_current_rate_not_the_running_average():
    result = read("deepspeed", "deepspeed", gpus=8, global_batch_sequences=32)
    assert column(result, "step_seconds") == pytest.approx([32 / 25.7, 32 / 25.65])
    assert column(result, "learning_rate") == [6e-06, 9e-06]
    assert result.steps[0].peak_allocated_bytes == round(38.49 * GIB)


@pytest.mark.parametrize(
    ("first", "seconds", "kept"),
    [
        (0, (44.9, 0.319, 5.658), [1]),
        (0, (74.0, 0.323, 106.8, 49.96, 49.99, 50.02), [1, 4, 5, 6]),
        (0, (36.35, 176.7, 3.05, 3.58, 3.60, 3.59), [1, 2, 3, 4, 5, 6]),
        (700, (5.6, 5.7, 5.65), [701, 702, 703]),
    ],
)
def test_a_step_that_jax_has_only_dispatched_has_no_time(first, seconds, kept):
    text = "completed step: {}, seconds: {}, TFLOP/s/device: 100.0, Tokens/s/device: 900.0, total_weights: 49152, loss: 12.0"
    lines = [text.format(first + index, value) for index, value in enumerate(seconds)]
    assert column(parsed_log(collect(lines, "maxtext"), Workload()), "step") == kept


def test_hosts_that_each_print_their_own_time_of_a_step_are_one_process():
    text = "[host-{}] completed step: {}, seconds: {}, TFLOP/s/device: 100.0, Tokens/s/device: 900.0, loss: {}"
    lines = [text.format(host, step, 5.6 + host / 1000, 12.0 - step) for step in range(6) for host in range(4)]
    contents = collect(lines, "maxtext")
    assert contents.restarts == 0
    assert column(parsed_log(contents, Workload()), "step_seconds") == [5.6] * 6


TIMER = (
    "[2024-06-21 10:50:42,168] [INFO] [timer.py:260:stop] epoch=0/micro_step={0}/global_step={0}, RunningAvgSamplesPerSec=101.1, "
    "CurrSamplesPerSec=101.05, MemAllocated=6.01GB, MaxMemAllocated=19.52GB"
)
MEGATRON_DEEPSPEED = (
    "[2024-06-21 10:50:42][INFO][training:1609] -  iteration=       {0}/  317892 | consumed_samples=         768 | "
    "elapsed_time_per_iteration_ms=63400.0 | learning_rate=1.88743e-08 | global_batch_size=  768 | lm loss=11.133188 | "
    "loss_scale=1.0 | grad_norm=6.363 | actual_seqlen= 4096 | number_of_skipped_iterations=  0 | "
    "number_of_nan_iterations=  0 | samples_per_second=12.114 |"
)
GPT_NEOX = (
    " samples/sec: 187.3 | iteration  {0:8d}/  320000 | elapsed time per iteration (ms): 63400.0 | learning rate: 1.88743E-08 | "
    "lm_loss: 11.133188 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.mark.parametrize("iteration", [MEGATRON_DEEPSPEED, GPT_NEOX], ids=["megatron-deepspeed", "gpt-neox"])
@pytest.mark.parametrize("timer_first", [True, False])
def test_the_time_of_an_iteration_counts_not_the_rate_of_deepspeeds_timer(iteration, timer_first):
    numbers = (10, 20, 30)
    pairs = [(TIMER, iteration) if timer_first else (iteration, TIMER) for _ in numbers]
    lines = [text.format(number) for number, pair in zip(numbers, pairs, strict=True) for text in pair]
    result = parsed_log(collect(lines, "deepspeed"), Workload(gpus=8, global_batch_sequences=768))
    assert column(result, "step") == [20, 30]
    assert column(result, "step_seconds") == [63.4] * 2
    assert column(result, "loss") == [11.133188] * 2
    assert result.steps[0].peak_allocated_bytes == round(19.52 * GIB)


def test_a_log_with_times_takes_none_from_deepspeeds_timer():
    lines = [TIMER.format(5), TIMER.format(10), MEGATRON_DEEPSPEED.format(10)]
    result = parsed_log(collect(lines, "deepspeed"), Workload(gpus=8, global_batch_sequences=768))
    assert column(result, "step_seconds") == [63.4]
    assert any("a rate of the framework's timer and no time: step 5" in note for note in result.notes)


def test_megatron_deepspeed_is_recognised_by_its_iteration_line():
    assert dialect_of(MEGATRON_DEEPSPEED.format(1)).name == "deepspeed"
    result = parsed_log(collect([MEGATRON_DEEPSPEED.format(1)], "auto"), Workload())
    assert (result.evidence.global_batch_sequences, result.evidence.sequence_tokens) == (768, 4096)
    assert (result.steps[0].loss, result.steps[0].grad_norm, result.steps[0].learning_rate) == (11.133188, 6.363, 1.88743e-08)


def test_composer_gathers_the_lines_of_a_batch():
    contents = collect(lines_of("composer"), "composer")
    result = parsed_log(contents, Workload(gpus=8, global_batch_sequences=192, sequence_tokens=2048))
    assert column(result, "step") == [11, 12]
    assert result.steps[0].step_seconds == pytest.approx(192 * 2048 / (10643.1234 * 8))
    assert column(result, "loss") == [10.1, 9.8]
    assert result.steps[0].peak_allocated_bytes == 38_260_000_000
    assert contents.evidence["matmul_dtype"] == "bf16"


def test_a_second_attempt_of_composer_replaces_the_first():
    batch = ["[batch={}/30]:", "\t Train loss/train/total: {}", "\t Train throughput/device/tokens_per_sec: {}"]
    attempts = [(1, 10.5, 500.0), (2, 10.4, 9000.0), (1, 10.6, 400.0), (2, 10.3, 9500.0), (3, 10.2, 9600.0)]
    lines = [text.format(value) for values in attempts for text, value in zip(batch, values, strict=True)]
    contents = collect(lines, "composer")
    assert contents.restarts == 1
    assert [(step.loss, step.tokens_per_second_per_gpu) for step in contents.steps.values()] == [
        values[1:] for values in attempts[2:]
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "line",
    [
        "",
        "iteration",
        "elapsed time per iteration",
        " iteration 3/",
        "step: x loss: tps: wps:",
        "iteration: 5 / 20 | time_per_iteration_ms:",
        "completed step: , seconds: ",
        "global_step=, CurrSamplesPerSec=",
        "Training epoch 0, iteration 1/2 | train_step_timing in s: | lr: |",
        "Step 1 | loss: tokens_per_second_per_gpu:",
        " iteration 3/ 5 | elapsed time per iteration (ms): | lm loss: \ufffd |",
        " iteration 3/ 5 | elapsed time per iteration (ms): | approx flops per GPU: 1.2.3TFLOPS |",
        "Total number of parameters in billions: .",
        "[batch=] Train : x",
        "max allocated (after x iterations) memory (MB)",
    ],
)
def test_torn_lines_break_nothing(name, line):
    contents = LogContents()
    if fields := find_dialect(name).read_line(line):
        contents.add(fields, 1)
    assert parsed_log(contents, Workload(gpus=8)).steps == ()
