"""What the lines of each format mean, asserted on logs that name the origin of their wording."""

import json
from datetime import datetime

import pytest
from a_log import GIB, STEMS, collect, column, evidence_by, lines_of, parse, reading_of, run_from
from plans import request_of

from tprimat.config.load import read_config
from tprimat.core.errors import RecordError
from tprimat.logs.claims import Claims
from tprimat.logs.contents import LogContents
from tprimat.logs.parse import DIALECTS, NAMES, dialect_of
from tprimat.logs.read import evidence_of, parsed_log, sequence_from_rates
from tprimat.plan.build import build_plan
from tprimat.records.schema import StepRecord
from tprimat.train.step_log import iteration_line


def test_every_log_says_where_it_comes_from_and_its_dialect_is_recognised():
    named = {}
    for stem in STEMS:
        lines = lines_of(stem)
        assert lines[0].startswith(("# Constructed: ", "# Recorded: ")), stem
        named[stem] = max((name for name in NAMES if stem.replace("_", "-").startswith(name)), key=len)
        assert reading_of(lines).dialect.name == named[stem], stem
    assert set(named.values()) == set(NAMES)


def test_a_log_of_nothing_known_names_what_was_looked_for():
    with pytest.raises(RecordError) as caught:
        reading_of(["hello", "Traceback (most recent call last):"]).check(None)
    assert all(dialect.name in str(caught.value) for dialect in DIALECTS)


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
    assert list(parse(lines, "tprimat", sequence_tokens=2048).steps) == steps


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem.startswith("primus_core")])
def test_primus_core_lines(stem):
    result = parse(lines_of(stem), "primus", gpus=8, sequence_tokens=8192)
    assert column(result, "step") == [1, 2, 3, 4]
    assert column(result, "step_seconds") == pytest.approx([33.687, 2 * 21.7617 - 33.687, 9.8363, 9.7024])
    assert column(result, "loss") == pytest.approx([11.89761, 2 * 11.897 - 11.89761, 11.31, 10.9])
    assert column(result, "learning_rate") == [5e-6, 1e-5, 9.99e-6, 9.9e-6]
    assert column(result, "grad_norm") == [7.499, 7.412, 6.9, 5.1]
    assert column(result, "tokens") == [128 * 8192] * 4
    assert column(result, "peak_allocated_bytes") == [None] * 4
    assert (result.evidence.world_size, result.evidence.workload.global_batch_sequences) == (8, 128)
    assert any("mean with step 1" in note for note in result.notes)
    assert sequence_from_rates(collect(lines_of(stem)), 8) == 8192


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem.startswith("primus_legacy")])
def test_primus_legacy_lines_print_the_time_of_each_step_first(stem):
    result = parse(lines_of(stem), "primus", gpus=8)
    assert column(result, "step_seconds") == pytest.approx([9.8363, 9.7024])
    assert column(result, "tokens") == [None, None]
    assert sequence_from_rates(collect(lines_of(stem)), 8) == 8192


def test_primus_gb_are_gib():
    for stem, used in (("core_v26_2", 117.98), ("legacy_gb", 117.99), ("legacy_gib", 117.99)):
        assert collect(lines_of(f"primus_{stem}")).device_used_bytes == round(used * GIB)


def test_primus_module_configuration_and_success():
    prefix = (
        "[\x1b[32m20260822 07:39:10\x1b[0m][\x1b[36mrank-0/8\x1b[0m]\x1b[1m[INFO ]    \x1b[0m\x1b[1m[--module_utils.py:227] : "
    )
    rows = {
        "tensor_model_parallel_size    ": "4 (int)",
        "bf16   ": "True (bool)",
        "fp8     ": "hybrid (str)",
        "train_iters ": "50 (int)",
        "num_experts": "8 (int)",
        "moe_expert_capacity_factor": "1.25 (float)",
        "enable_turbo_attention_float8": "True (bool)",
    }
    contents = collect([f"{prefix}  {name} : {value}\x1b[0m" for name, value in rows.items()] + ["Training completed."], "primus")
    assert (contents.total_steps, contents.finished) == (50, True)
    proof = evidence_of(contents)[0]
    assert (
        proof.workload.tensor_parallel,
        proof.workload.matmul_dtype,
        proof.workload.attention_dtype,
        proof.workload.expert_capacity,
    ) == (4, "fp8", "fp8", 1.25)


def test_megatron_lm():
    result = parse(lines_of("megatron_lm"), gpus=4, sequence_tokens=4096)
    assert column(result, "step_seconds") == pytest.approx([30.4974, 0.752, 0.7601, 0.7553, 0.758, 0.7519])
    assert column(result, "finite") == [True, True, True, True, False, True]
    assert column(result, "grad_norm") == [7.5, 7.1, 6.0, 5.5, None, 5.0]
    assert result.steps[1].loss == pytest.approx(11.87)
    assert column(result, "peak_allocated_bytes") == [None] + [round(40970.5 * 2**20)] * 5
    assert column(result, "peak_reserved_bytes")[1] == 45056 * 2**20
    proof, ran = result.evidence, result.evidence.workload
    assert (proof.world_size, ran.tensor_parallel, ran.pipeline_parallel, ran.data_parallel) == (4, 2, 1, 2)
    assert (ran.micro_batch_sequences, ran.global_batch_sequences, ran.sequence_tokens) == (2, 64, 4096)
    assert (ran.matmul_dtype, ran.parameter_dtype, proof.transformer_engine) == ("bf16", "bfloat16", True)
    assert (ran.sequence_parallel, ran.data, ran.optimizer, ran.virtual_pipeline) == (True, "mock", "adam", None)
    assert proof.parameters is None, "a rank's share under tensor parallelism is not the model's count"
    assert proof.tokens_per_step == 64 * 4096


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


def test_shorter_sequences_of_curriculum_learning_are_left_out():
    line = " iteration {}/ 20 | consumed samples: {} | actual seqlen: {} | elapsed time per iteration (ms): {} | "
    line += "global batch size: 128 | lm loss: 1.1E+01 | tokens per gpu per second (tgs): {} |"
    lines = ["using world size: 8"]
    for step in range(1, 21):
        length, ms = (512, 1000.0) if step <= 12 else (2048, 4000.0)
        lines.append(line.format(step, 128 * step, length, ms, 128 * length / ms * 125))
    run = run_from(lines, "llama", gpus=8, accelerator="H100 SXM")
    assert (column(run, "step"), run.record.ran.sequence_tokens) == (list(range(13, 21)), 2048)
    assert column(run, "tokens") == [128 * 2048] * 8
    assert any("from 512 to 2048 tokens" in note for note in run.notes)


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


def test_megatron_bridge():
    result = parse(lines_of("megatron_bridge"), sequence_tokens=8192)
    assert column(result, "step_seconds") == pytest.approx([105.7958, 7.1476, 7.154, 7.1783])
    assert result.steps[3].peak_allocated_bytes == 153_470_000_000
    proof = result.evidence
    assert (
        proof.workload.context_parallel,
        proof.workload.tensor_parallel,
        proof.workload.matmul_dtype,
        proof.workload.sequence_tokens,
    ) == (2, 1, "fp8", 8192)
    contents = collect(lines_of("megatron_bridge_nemo_run"))
    assert column(parsed_log(contents, Claims()), "step_seconds") == pytest.approx([30.089, 9.089, 9.1])
    assert [step.tflops_per_gpu for step in contents.steps.values()] == [200.5, 663.5, 662.8]
    shape = {"hidden_size": "4096", "num_attention_heads": "32", "num_layers": "32", "ffn_hidden_size": "14336"}
    assert contents.arguments == shape, "without those of the nested model, which stand further to the right"


def test_megatron_bridge_of_2025_is_recognised_in_whatever_order_its_ranks_print():
    lines = ["  num_layers: 32", "  hidden_size: 4096", *lines_of("megatron_bridge_2025")[1:]]
    for cut in range(1, 5):
        reading = reading_of(lines[:cut])
        reading.add(lines[cut:])
        assert (reading.dialect.name, list(reading.contents.steps)) == ("megatron-bridge", [10, 20])
        assert reading.contents.arguments == {"num_layers": "32", "hidden_size": "4096"}
        assert reading.contents.steps[20].tflops_per_gpu == 58.2
        (step,) = parsed_log(reading.contents, Claims()).steps
        assert (step.step_seconds, step.peak_allocated_bytes) == (pytest.approx(14.2603), round(12712.43603515625 * 2**20))


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
    "Docker's JSON": None,
}


def in_json(line):
    return json.dumps({"log": line + "\n", "stream": "stdout", "time": "2026-01-01T10:00:00.123456789Z"})


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_a_launcher_puts_around_a_line_changes_nothing(wrapper):
    wrap = in_json if WRAPPERS[wrapper] is None else WRAPPERS[wrapper].format
    logs = {stem: lines_of(stem)[1:] for stem in STEMS if stem not in {"tprimat", "megatron_bridge_nemo_run"}}
    logs["shape"] = ["  num_layers: 32", "  vision:", "    num_layers: 24", "  swiglu: true", *logs["megatron_bridge_2025"]]
    for stem, lines in logs.items():
        wrapped, plain = collect(map(wrap, lines)), collect(lines)
        assert repr(wrapped.steps) == repr(plain.steps), (stem, "with losses that are no numbers")
        for name in ("evidence", "arguments", "total_steps", "finished", "accelerator"):
            assert getattr(wrapped, name) == getattr(plain, name), stem


def test_json_may_be_torn_or_hold_a_progress_bar():
    nested = '{"message":' + "[" * 100_000
    line = MEGATRON_DEEPSPEED.format(1)
    assert list(collect([nested, in_json(line)[:-30], '{"log": 5}', '{"log":']).steps) == [1]
    bars = [line for line in lines_of("nemo_1") if line.startswith("Epoch")]
    assert repr(collect([in_json("\r".join(bars))]).steps) == repr(collect(bars).steps)


def test_the_progress_bar_of_nemo_1():
    contents = collect(lines_of("nemo_1"))
    result = parsed_log(contents, Claims(global_batch_sequences=2048))
    assert (column(result, "step"), column(result, "step_seconds")) == ([1, 2, 3, 4], [70.1, 49.6, 49.5, 49.7])
    assert (column(result, "loss"), column(result, "finite")) == ([11.8, 11.7, 11.5, None], [True, True, True, False])
    assert (contents.total_steps, contents.restarts, contents.evidence["world_size"]) == (15, 0, 8)
    assert [step.consumed_sequences for step in contents.steps.values()] == [2048, 4096, 6144, 8192]


def test_nemo_counts_steps_from_one_here():
    contents = collect(lines_of("nemo"))
    result = parsed_log(contents, Claims(sequence_tokens=8192))
    assert (column(result, "step"), column(result, "step_seconds")) == ([1, 2, 3, 4], [61.07, 9.441, 9.437, 9.44])
    assert (result.steps[0].learning_rate, result.steps[0].peak_allocated_bytes) == (1.5e-07, 70833405952)
    assert (contents.total_steps, contents.finished) == (4, True)
    proof, ran = result.evidence, result.evidence.workload
    assert (proof.world_size, ran.tensor_parallel, ran.pipeline_parallel, ran.context_parallel) == (8, 2, 2, 1)


def test_torchtitan_derives_times_from_the_rate_per_gpu():
    contents = collect(lines_of("torchtitan"))
    result = parsed_log(contents, Claims(gpus=8, sequence_tokens=8192))
    assert column(result, "step") == [1, 10, 20, 30]
    assert column(result, "step_seconds") == pytest.approx([8 * 8192 / (rate * 8) for rate in (312, 4376, 4400, 4390)])
    assert column(result, "loss") == [12.2347, 11.8351, 10.5, 9.5]
    assert result.steps[1].peak_reserved_bytes == round(48.87 * GIB)
    assert (contents.accelerator, contents.total_steps, contents.finished) == ("NVIDIA H200", 30, True)
    proof, ran = result.evidence, result.evidence.workload
    assert (proof.world_size, ran.tensor_parallel, ran.data_parallel, ran.matmul_dtype) == (8, 2, 4, "fp8")
    assert (ran.sequence_tokens, ran.micro_batch_sequences, ran.global_batch_sequences) == (8192, 2, 8)


@pytest.mark.parametrize(
    ("stem", "degrees", "batch", "tokens", "rates"),
    [
        ("torchtitan_0_2", (4, 2, 1, 2, "bf16"), (2, 8, 2048), 8 * 2048, (312, 8192, 4096)),
        ("torchtitan_2026_08", (8, 2, 1, 4, "fp8"), (2, 16, 8192), 16 * 8192, (1024, 8192, 8192)),
        ("torchtitan_primus", (8, 1, 1, 8, "fp8"), (4, 32, 8192), 32 * 8192, (1100, 13004, 13010)),
    ],
)
def test_torchtitan_names_its_degrees_its_precision_and_its_batch_in_sequences_or_tokens(stem, degrees, batch, tokens, rates):
    result = parse(lines_of(stem))
    proof = result.evidence
    assert (
        proof.world_size,
        proof.workload.tensor_parallel,
        proof.workload.pipeline_parallel,
        proof.workload.data_parallel,
        proof.workload.matmul_dtype,
    ) == degrees
    assert (proof.workload.micro_batch_sequences, proof.workload.global_batch_sequences, proof.workload.sequence_tokens) == batch
    assert column(result, "step_seconds") == pytest.approx([tokens / (rate * degrees[0]) for rate in rates], rel=2e-3)


def test_torchtitan_in_primus_says_its_dtype():
    lines = lines_of("torchtitan_primus")
    plain = [line for line in lines if "Swapped" not in line]
    assert evidence_by(plain).workload.matmul_dtype == "bf16"
    resumed = evidence_by([*lines, *(line.replace("total steps 3", "total steps 6") for line in plain)])
    assert (resumed.workload.matmul_dtype, resumed.workload.routing) == ("bf16", None), "a later process without Turbo's layers"


def test_a_batch_of_torchtitan_that_is_no_whole_number_of_sequences_is_unknown():
    line = "Trainer is initialized with 3000 tokens per DP rank, 12000 tokens per train step, gradient accumulation steps 1, "
    line += "maximum context length 8192, total steps 20 (warmup 2)"
    assert collect([line], "torchtitan").evidence == {"sequence_tokens": 8192}


def test_torchtitan_of_2024_says_wps_and_without_a_known_batch_has_no_times():
    result = parse(lines_of("torchtitan_wps"), gpus=8)
    assert (result.steps, "logged steps without a time, which are left out: 3" in result.notes) == ((), True)
    result = parse(lines_of("torchtitan_wps"), gpus=8, global_batch_sequences=16, sequence_tokens=8192)
    assert result.steps[1].step_seconds == pytest.approx(16 * 8192 / (5762 * 8))


def test_maxtext_has_no_time_for_steps_that_jax_may_only_have_dispatched():
    result = parse(lines_of("maxtext"), gpus=8, sequence_tokens=2048)
    assert (column(result, "step"), column(result, "step_seconds")) == ([1, 4], [44.923, 5.667])
    assert (result.evidence.tokens_per_step, result.evidence.world_size, result.evidence.workload.matmul_dtype) == (
        24 * 2048,
        8,
        "bf16",
    )
    text = "[host-{}] completed step: {}, seconds: {}, TFLOP/s/device: 100.0, Tokens/s/device: 900.0, loss: {}"
    lines = [text.format(host, step, 5.6 + host / 1000, 12.0 - step) for step in range(6) for host in range(4)]
    assert collect(lines).restarts == 0, "hosts that each print their own time of a step"
    assert column(parse(lines), "step_seconds") == [5.6] * 4


def test_deepspeed_reads_the_current_rate_not_the_running_average():
    result = parse(lines_of("deepspeed"), gpus=8, global_batch_sequences=32)
    assert column(result, "step_seconds") == pytest.approx([32 / 25.7, 32 / 25.65])
    assert column(result, "learning_rate") == [6e-06, 9e-06]
    assert result.steps[0].peak_allocated_bytes == round(38.49 * GIB)


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
    result = parsed_log(contents, Claims(gpus=8, global_batch_sequences=768))
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
        assert parsed_log(contents, Claims(gpus=8)).steps == ()
