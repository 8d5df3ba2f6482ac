"""What the lines of each format mean. Records of whole logs, with steps and evidence, are in tests/goldens/logs."""

import itertools
from datetime import datetime

import pytest
from a_log import GIB, STEMS, collect, column, evidence_by, lines_of, parse, parsed, reading_of
from plans import request_of

from tprimat.config.load import read_config
from tprimat.logs.contents import LogContents
from tprimat.logs.failures import cause_in
from tprimat.logs.parse import DIALECTS, NAMES, dialect_of
from tprimat.logs.shape import dense_layers_of
from tprimat.plan.build import build_plan
from tprimat.records.schema import StepRecord


def test_every_log_says_where_it_comes_from_and_its_dialect_is_recognized():
    named = {}
    for stem in STEMS:
        lines = lines_of(stem)
        assert lines[0].startswith(("# Constructed: ", "# Recorded: ")), stem
        named[stem] = max((name for name in NAMES if stem.replace("_", "-").startswith(name)), key=len)
        assert reading_of(lines).dialect.name == named[stem], stem
    assert set(named.values()) == set(NAMES)


@pytest.mark.slow
def test_what_our_own_line_says_is_read_back():
    from tprimat.train.rank import iteration_line  # imports torch

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
    assert list(parse(lines, "tprimat", sequence_tokens=2048).steps) == steps


def test_megatron_lm_without_splits_counts_parameters():
    lines = ["using world size: 2, data-parallel size: 2, tensor-model-parallel size: 1, pipeline-model-parallel size: 1"]
    for names, ranks in (("tensor, pipeline", "0, 0"), ("tensor, gtp_remat, pipeline", "0, 0, 0")):  # since core 0.19
        line = f" > number of parameters on ({names}) model parallel rank ({ranks}): 8030261248"
        assert evidence_by([*lines, line], "megatron-lm").parameters == 8030261248


def test_what_builds_on_megatron_adds_a_sequence_length_a_rate_or_memory():
    line = " iteration        5/      10 | consumed samples:         7680 | elapsed time per iteration (ms): 344656.1 | "
    line += "global batch size:  1536 | lm loss: 1.1E+01 | actual seqlen:  2048 | samples per second: 4.457 | "
    contents = collect([line + "tokens per gpu per second (tgs): 142.612 | TFLOPs: 153.38 |"])  # Megatron-DeepSpeed
    assert contents.evidence["sequence_tokens"] == 2048
    assert (contents.steps[5].tokens_per_second_per_gpu, contents.steps[5].step_seconds) == (142.612, 344.6561)
    line = " [2026-03-03 16:38:36] iteration        2/     624 | elapsed time per iteration (ms): 3988.6 | "
    line += "memory(GiB): 83.46 | elapsed time: 3m 8s | remaining time: 16h 12m 43s | loss: 1.529132E-02 | grad norm: 75.173 |"
    (step,) = parse([line]).steps  # ms-swift
    assert (step.loss, step.peak_reserved_bytes) == (0.01529132, round(83.46 * GIB))


def test_a_command_and_the_lines_of_the_start_say_what_runs():
    lines = [
        "+ torchrun pretrain_gpt.py --num-layers 24 --seq-length 4096 --train-iters 90 --bf16 --swiglu --micro-batch-size $MBS",
        "using world size: 8, data-parallel-size: 4, tensor-model-parallel size: 2, pipeline-model-parallel size: 1",
        "using torch.float16 for parameters ...",
    ]
    for dialect in ("megatron-lm", "deepspeed"):
        contents = collect(lines, dialect)
        told = {"sequence_tokens": 4096, "matmul_dtype": "fp16", "world_size": 8, "tensor_parallel": 2, "pipeline_parallel": 1}
        assert (contents.evidence, contents.total_steps) == (told, 90)
        assert contents.arguments == {"num_layers": "24", "swiglu": "True"}


def test_fp8_without_transformer_engine_is_no_fp8():
    rows = ["  bf16 ..................... True", "  fp8 ....................... hybrid", "  transformer_impl ........ local"]
    result = parse(rows, "megatron-lm")
    assert result.evidence.workload.matmul_dtype is None
    assert any("ignores" in note for note in result.notes)


@pytest.mark.parametrize(
    ("name", "line", "dtype"),
    [
        ("megatron-lm", "  fp4 ........ e2m1", "fp4"),
        ("megatron-lm", "  fp4 ........ None", "bf16"),
        ("megatron-lm", "  fp8_hybrid ........ True", "fp8"),
        ("megatron-lm", "  fp8_e4m3 ........ False", "bf16"),
        ("torchtitan", "INFO - MX training active with recipe mxfp8_cublas", "fp8"),
        ("torchtitan", "INFO - MX training active with recipe mxfp4_cutlass\nINFO - Swapped to MXLinear layers", "fp4"),
        ("torchtitan", "[rank-0/8][INFO] : Swapped to MXLinear layers", "fp8"),
        ("torchtitan", "INFO - Mixed precision training is disabled", "fp32"),
        ("maxtext", "Config param quantization: int8", "int8"),
        ("maxtext", "Config param quantization: fp8_full", "fp8"),
        ("maxtext", "Config param quantization: intmp", "intmp"),
    ],
)
def test_narrow_dtypes_are_not_called_bf16(name, line, dtype):
    wide = {"torchtitan": '"mixed_precision_param": "bfloat16"', "maxtext": "Config param dtype: bfloat16"}
    assert evidence_by([wide.get(name, "  bf16 ........ True"), *line.split("\n")], name).workload.matmul_dtype == dtype


def test_megatron_bridge_of_2025_is_recognized_in_whatever_order_its_ranks_print():
    lines = ["  num_layers: 32", "  hidden_size: 4096", *lines_of("megatron_bridge_2025")[1:]]
    for cut in range(1, 5):
        reading = reading_of(lines[:cut])
        reading.add(lines[cut:])
        assert (reading.dialect.name, list(reading.contents.steps)) == ("megatron-bridge", [10, 20])
        assert reading.contents.arguments == {"num_layers": "32", "hidden_size": "4096"}
        assert reading.contents.steps[20].tflops_per_gpu == 58.2
        (step,) = parsed(reading.contents).steps
        assert (step.step_seconds, step.peak_allocated_bytes) == (pytest.approx(14.2603), round(12712.43603515625 * 2**20))


WRAPPERS = (
    "[pod/train-0/pytorch] {}",
    "[pod/train-0/pytorch] 2026-01-01T10:00:00.123456789Z {}",
    "2026-01-01T10:00:00.123456789Z stdout F {}",
    "3: {}",
    " 3: {}",
    "3: [default0]:{}",
    "node01: {}",
    "[1,0]<stdout>:{}",
    "trainer-1  | {}",
    "\x1b[36mtrainer-1  | \x1b[0m{}",
    "(TrainWorker pid=123, ip=10.0.0.1) {}",
    "(pretraining, pid=4112) {}",
    "{}\r",
)
"""Of kubectl, a node of Kubernetes, srun (padded from ten tasks on), pdsh, mpirun, docker compose, Ray, SkyPilot, Windows."""


def test_digits_that_are_no_day_no_count_and_no_signal_are_read_past():
    step = "step:  1  loss: 9.0  memory: 6.9GiB(10%)  tps: 6,790"
    for stamp in ("2025-13-45 01:18:26,708", "2025-12-\uff11\uff12 01:18:26,708"):
        assert collect([f"[rank0]:[titan] {stamp} - root - INFO - {step}"]).steps[1].stamp is None
    nines = "9" * 5000
    assert cause_in([f"failed (exitcode: -{nines}) local_rank: 3"], ()) is None
    assert dense_layers_of({"num_layers": "4", "moe_layer_freq": f"[0]*{nines}"}) > 4
    reading_of([f"{nines} | step {nines} | loss {nines} | grad_norm 1 | mem 1 | tps 1"])


def test_colors_that_were_pasted_without_their_first_byte_or_as_text_change_nothing():
    lines = lines_of("primus_core_head")
    for escape in ("", "^[", "\\x1b", "\\u001b", "\\033", "\u241b"):
        read = collect(line.replace("\x1b", escape) for line in lines)
        assert (repr(read.steps), read.evidence) == (repr(collect(lines).steps), collect(lines).evidence), escape


def test_what_a_launcher_puts_around_a_line_changes_nothing():
    logs = {stem: lines_of(stem)[1:] for stem in STEMS if stem not in {"tprimat", "megatron_bridge_nemo_run"}}
    logs["shape"] = ["  num_layers: 32", "  vision:", "    num_layers: 24", "  swiglu: true", *logs["megatron_bridge_2025"]]
    read = {stem: collect(lines) for stem, lines in logs.items()}
    for wrapper, (stem, plain) in itertools.product(WRAPPERS, read.items()):
        wrapped = collect(map(wrapper.format, logs[stem]))
        assert repr(wrapped.steps) == repr(plain.steps), (stem, "with losses that are no numbers")
        for name in ("evidence", "arguments", "total_steps", "finished", "accelerator"):
            assert getattr(wrapped, name) == getattr(plain, name), (stem, wrapper)


def test_torchtitan_in_primus_says_its_dtype():
    lines = lines_of("torchtitan_primus")
    plain = [line for line in lines if "Swapped" not in line]
    assert evidence_by(plain).workload.matmul_dtype == "bf16"
    resumed = evidence_by([*lines, *(line.replace("total steps 3", "total steps 6") for line in plain)])
    assert (resumed.workload.matmul_dtype, resumed.workload.routing) == ("bf16", None), "a later process without Turbo's layers"


def test_maxtext_has_no_time_for_steps_that_jax_may_only_have_dispatched():
    result = parse(lines_of("maxtext"), gpus=8, sequence_tokens=2048)
    assert (column(result, "step"), column(result, "step_seconds")) == ([1, 4], [44.923, 5.667])
    seen = result.evidence.tokens_per_step, result.evidence.world_size, result.evidence.workload.matmul_dtype
    assert seen == (24 * 2048, 8, "bf16")
    text = "[host-{}] completed step: {}, seconds: {}, TFLOP/s/device: 100.0, Tokens/s/device: 900.0, loss: {}"
    lines = [text.format(host, step, 5.6 + host / 1000, 12.0 - step) for step in range(6) for host in range(4)]
    assert list(collect(lines).steps) == [1, 2, 3, 4, 5, 6], "hosts that each print their own time of a step"
    assert column(parse(lines), "step_seconds") == [5.6] * 4


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


@pytest.mark.parametrize("pair", [(TIMER, MEGATRON_DEEPSPEED), (MEGATRON_DEEPSPEED, TIMER)], ids=["timer first", "timer last"])
def test_the_time_of_an_iteration_counts_not_the_rate_of_deepspeeds_timer(pair):
    lines = [TIMER.format(5), *(text.format(number) for number in (10, 20, 30) for text in pair)]
    contents = collect(lines)
    result = parsed(contents, gpus=8, global_batch_sequences=768)
    assert (column(result, "step"), column(result, "step_seconds")) == ([10, 20, 30], [63.4] * 3)
    first = result.steps[0]
    assert (first.loss, first.grad_norm, first.learning_rate) == (11.133188, 6.363, 1.88743e-08)
    assert first.peak_allocated_bytes == round(19.52 * GIB)
    assert (result.evidence.workload.global_batch_sequences, result.evidence.workload.sequence_tokens) == (768, 4096)
    assert any("a rate of the framework's timer and no time: step 5" in note for note in result.notes)
    assert dialect_of(MEGATRON_DEEPSPEED.format(1)).name == "deepspeed"


def test_torn_lines_break_nothing():
    torn = [
        "",
        "iteration",
        "elapsed time per iteration",
        " iteration 3/",
        "step: x loss: tps: wps:",
        "completed step: , seconds: ",
        "global_step=, CurrSamplesPerSec=",
        "Training epoch 0, iteration 1/2 | train_step_timing in s: | lr: |",
        " iteration 3/ 5 | elapsed time per iteration (ms): | lm loss: \ufffd |",
        "Total number of parameters in billions: .",
        "max allocated (after x iterations) memory (MB)",
    ]
    for dialect in DIALECTS:
        contents = LogContents()
        for line in torn:
            if fields := dialect.read_line(line):
                contents.add(fields, 1)
        assert parsed(contents, gpus=8).steps == ()
