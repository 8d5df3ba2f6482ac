"""Two logs whose work or arithmetic differs in one argument are never repetitions, and compare.py says what differs."""

import re
from pathlib import Path

import pytest
from commands import run_command

from tprimat.logs.arithmetic import arithmetic_of, options_of
from tprimat.logs.extract import evidence_of
from tprimat.logs.parse import LogReading
from tprimat.logs.shape import other_layers
from tprimat.records.discover import read_result

LOGS = Path(__file__).parent
END = re.compile(r"^.*-{5,} end of arguments.*$", re.MULTILINE)
PRINTED = {
    "accumulate_allreduce_grads_in_fp32": True,
    "attention_backend": "AttnBackend.auto",
    "exp_avg_dtype": "torch.float32",
    "exp_avg_sq_dtype": "torch.float32",
    "fp8_recipe": "delayed",
    "fp8_wgrad": True,
    "grad_reduce_in_bf16": False,
    "main_grads_dtype": "torch.float32",
    "main_params_dtype": "torch.float32",
    "optimizer_cpu_offload": False,
    "overlap_grad_reduce": True,
    "recompute_modules": "['core_attn']",
    "te_precision_config_file": None,
    "use_precision_aware_optimizer": False,
}
"""As Megatron-LM prints them by default, but for the overlap."""


def rows(arguments):
    return "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in arguments.items())


def log_in(folder, arguments):
    """A log of Mixtral with further arguments, which the dump's later rows override."""
    folder.mkdir()
    text = (LOGS / "megatron_lm_mixtral.log").read_text(encoding="utf8")
    text = END.sub(lambda match: rows(PRINTED | arguments) + match[0], text)
    (folder / "train.log").write_text(text, encoding="utf8")
    return folder / "train.log"


def record_of(log):
    done = run_command(
        "extract_primus_metrics.py", "--log-file", log, "--model-name", "auto", "--gpu", "H100 SXM", "--num-nodes", "2"
    )
    assert done.returncode == 0, done.stderr
    return next(log.parent.glob("benchmark_*.json"))


FP8 = {"fp8": "hybrid"}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "torch.bfloat16"}


@pytest.mark.parametrize(
    ("both", "other", "said"),
    [
        ({}, NARROW, "they differ: optimizer states fp32 with moments in bf16 against fp32"),
        ({}, {"reset_attention_mask": True}, "they differ: sequence length 4,096 packed against 4,096"),
        ({}, {"optimizer": "sgd"}, "they differ: optimizer states fp32 (sgd) against fp32"),
        (FP8, {"fp8_wgrad": False}, "they differ: dtype that ran fp8 except in weight gradients against fp8"),
        (FP8, {"te_precision_config_file": "some.yaml"}, "they differ: dtype that ran fp8 except in what some.yaml names"),
        ({}, {"moe_router_force_biased": 0.5}, "they differ: routing biased against natural"),
        ({}, {"moe_expert_rank_capacity_factor": 1.5}, "they differ: expert capacity 1.5 against unlimited"),
        ({}, {"grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": False}, "Caution, also different: gradients in"),
        ({}, {"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True"),
        ({}, {"overlap_grad_reduce": False}, "overlap_grad_reduce=False"),
        ({"recompute_granularity": "selective"}, {"recompute_modules": "['core_attn', 'moe_act']"}, "=core_attn+moe_act"),
    ],
)
def test_an_argument_that_changes_the_work_or_the_arithmetic_is_named(both, other, said, tmp_path):
    folders = [tmp_path / name for name in ("usual", "other")]
    for folder, arguments in zip(folders, (both, both | other), strict=True):
        record_of(log_in(folder, arguments))
    done = run_command("compare.py", "--results-dir", *folders, cwd=tmp_path)
    words = " ".join(done.stdout.split())
    assert said in words, words
    assert "mean of 2 runs" not in words


@pytest.mark.parametrize(
    ("layers", "stages", "recompute", "first"),
    [(12, 1, "full", 12), (32, 1, "full", None), (8, 4, "full", None), (7, 4, "full", 7), (0, 1, "none", None)],
)
def test_the_layers_of_the_block_method_are_read(layers, stages, recompute, first):
    """Megatron recomputes the first of each stage; AMD's recipes name all 80 layers of a model, or none."""
    arguments = {"recompute_method": "block", "recompute_num_layers": str(layers), "num_layers": "32"}
    found = arithmetic_of(arguments, {"recompute": "full", "pipeline_parallel": stages})
    assert (found.get("recompute", "full"), found.get("recompute_layers")) == (recompute, first)


def test_logs_of_one_configuration_are_repetitions(tmp_path):
    records = [read_result(record_of(log_in(tmp_path / name, FP8))).run for name in ("one", "two")]
    assert records[0].engine_options == records[1].engine_options
    options = records[0].engine_options
    assert (options["overlap_grad_reduce"], options["recompute_modules"]) == (True, "core_attn")
    assert "te_precision_config_file" not in options
    assert (records[0].evidence.optimizer_states, records[0].evidence.gradient_dtype) == ("fp32", "float32")


@pytest.mark.parametrize(
    ("arguments", "gradients"),
    [
        ({}, None),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": True}, "float32"),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, "float32"),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False, "grad_reduce_in_bf16": True}, "bfloat16"),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False, "main_grads_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": False}, "float16"),
        ({"params_dtype": "torch.float32", "accumulate_allreduce_grads_in_fp32": False}, "float32"),
    ],
)
def test_gradients_are_in_the_dtype_that_megatron_resolves(arguments, gradients):
    assert evidence_by(rows(arguments)).gradient_dtype == gradients


def evidence_by(text, dialect="megatron-lm"):
    reading = LogReading(name="train.log", requested_dialect=dialect)
    reading.add(text.splitlines())
    return evidence_of(reading.contents)[0]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4", "first_last_layers_bf16": False}, ("nvfp4", 0)),
        ({"fp4": "e2m1", "fp4_recipe": "mxfp4", "first_last_layers_bf16": True}, ("mxfp4", 2)),
    ],
)
def test_fp4_says_how_it_scales_and_which_layers_it_leaves_out(arguments, found):
    evidence = evidence_by(rows({"bf16": True, **arguments}))
    assert (evidence.matmul_dtype, evidence.fp8_scaling, evidence.layers_in_bf16) == ("fp4", *found)


def test_profiled_steps_are_no_measure_of_speed(tmp_path):
    run = read_result(record_of(log_in(tmp_path / "one", {"profile": True, "profile_step_start": 2, "profile_step_end": 3}))).run
    assert run.profiled_steps == (2, 3, 4)


def test_megatron_bridge_prints_the_same_in_its_sections():
    text = "\n".join(
        (
            "comm_overlap:",
            "  overlap_grad_reduce: null",
            "ddp:",
            "  grad_reduce_in_fp32: false",
            "model:",
            "  bf16: true",
            "  recompute_granularity: full",
            "  sequence_parallel: false",
            "optimizer:",
            "  optimizer: adam",
            "  use_precision_aware_optimizer: true",
            "  exp_avg_dtype: torch.bfloat16",
        )
    )
    evidence = evidence_by(text, "megatron-bridge")
    assert (evidence.gradient_dtype, evidence.recompute, evidence.sequence_parallel) == ("bfloat16", "full", False)
    assert (evidence.optimizer, evidence.optimizer_states) == ("adam", "fp32 with moments in bf16 and fp32")


TITAN = "[rank0]:[titan] 2026-01-01 10:00:00,123 - root - INFO - "
SINGLE = "Float8 training active with recipe rowwise"
GROUPED = "Converted GroupedExperts to use dynamic float8 rowwise quantization with scaled grouped GEMMs"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["Float8 tensorwise scaled training active"], ("fp8", "current", ("experts",))),
        ([SINGLE, "Swapped to Float8Linear layers with enable_fsdp_float8_all_gather=False"], ("fp8", "rowwise", ("experts",))),
        ([SINGLE + "_with_gw_hp"], ("fp8", "rowwise", ("weight gradients", "experts"))),
        ([SINGLE, GROUPED], ("fp8", "rowwise", None)),
        ([GROUPED], ("fp8", "rowwise", ("all but the experts",))),
        (["MX training active with recipe mxfp8_cublas"], ("fp8", "mxfp8", ("experts",))),
        (["Converted Linear layers to NVFP4Linear"], ("fp4", "nvfp4", ("experts",))),
        (["Swapped to FP8Linear layers"], ("fp8", "current", None)),
    ],
)
def test_torchtitan_says_what_is_in_fp8(lines, found):
    evidence = evidence_by("\n".join(TITAN + line for line in lines), "torchtitan")
    assert (evidence.matmul_dtype, evidence.fp8_scaling, evidence.wider_parts) == found


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([SINGLE], "rowwise scaling against current scaling"),
        ([SINGLE + "_with_gw_hp"], "they differ: dtype that ran fp8 except in weight gradients against fp8"),
        (["Applied full activation checkpointing to the model"], "recompute full against recompute unknown"),
        (["Compiling each TransformerBlock with torch.compile"], "options unknown against compile=True"),
        (['        "dtype": "bfloat16",'], "optimizer states in bf16 against optimizer states unknown"),
        (["training.mixed_precision_reduce : bfloat16 (str)"], "gradients in bfloat16 against gradients unknown"),
    ],
)
def test_a_line_of_torchtitan_that_changes_the_arithmetic_is_named(lines, said, tmp_path):
    text = (LOGS / "torchtitan.log").read_text(encoding="utf8")
    added = "".join(line + "\n" if line.startswith(" ") else TITAN + line + "\n" for line in lines)
    for name, whole in (("usual", text), ("other", text.replace(TITAN + "Trainer", added + TITAN + "Trainer"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(whole.replace(" tps: 4,390", f" tps: 4,39{len(name)}"), encoding="utf8")
        done = run_command("extract_primus_metrics.py", "--log-file", tmp_path / name / "train.log", "--model-name", "auto")
        assert done.returncode == 0, done.stderr
    compared = run_command(
        "compare.py", "--results-dir", tmp_path / "usual", tmp_path / "other", "--baseline", tmp_path / "usual", cwd=tmp_path
    )
    words = " ".join(compared.stdout.split())
    assert said in words, words


def settings(**values):
    return "\n".join(
        f"I0317 09:59:16.241972 1234 pyconfig.py:413] Config param {name}: {value}" for name, value in values.items()
    )


@pytest.mark.parametrize("value", ["{}", "QuantizationType.{}"])
@pytest.mark.parametrize(
    ("quantization", "dtype", "scaling"),
    [
        ("none", "bf16", None),
        ("fp8_full", "fp8", None),
        ("te_fp8_currentscaling", "fp8", "current"),
        ("te_nvfp4", "fp4", "nvfp4"),
    ],
)
def test_maxtext_prints_its_quantization_as_a_word_or_as_a_member_of_an_enumeration(value, quantization, dtype, scaling):
    named = value.format(quantization.upper() if "." in value else quantization)
    evidence = evidence_by(settings(dtype="bfloat16", quantization=named), "maxtext")
    assert (evidence.matmul_dtype, evidence.fp8_scaling) == (dtype, scaling)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"mu_dtype": "bfloat16", "weight_dtype": "float32"}, "fp32 with moments in bf16 and fp32"),
        ({"weight_dtype": "bfloat16"}, "bf16"),
        ({"mu_dtype": "float32", "weight_dtype": "float32"}, "fp32"),
        ({}, None),
    ],
)
def test_maxtext_says_what_its_optimizer_keeps(values, found):
    assert evidence_by(settings(**values), "maxtext").optimizer_states == found


def test_maxtext_says_how_it_computes():
    text = settings(
        attention="cudnn_flash_te",
        capacity_factor=1.25,
        dataset_type="DatasetType.SYNTHETIC",
        grad_dtype="bfloat16",
        num_experts=8,
        num_experts_per_tok=2,
        opt_type="OptimizerType.ADAMW",
        remat_policy="minimal",
        use_random_routing=True,
    )
    evidence = evidence_by(text, "maxtext")
    assert (evidence.attention, evidence.gradient_dtype, evidence.data) == ("cudnn_flash_te", "bfloat16", "mock")
    assert (evidence.optimizer, evidence.recompute) == ("adamw", "selective")
    assert (evidence.routing, evidence.expert_capacity) == ("balanced", 1.25)


@pytest.mark.parametrize(
    ("name", "value", "windowed"),
    [
        ("attention_type", "AttentionType.LOCAL_SLIDING", True),
        ("attention_type", "AttentionType.GLOBAL", False),
        ("decoder_block", "DecoderBlockType.GEMMA3", True),
        ("decoder_block", "DecoderBlockType.LLAMA2", False),
        ("moba", True, True),
        ("moba", False, False),
    ],
)
def test_attention_within_a_window_is_seen_however_maxtext_prints_it(name, value, windowed):
    reading = LogReading(name="train.log", requested_dialect="maxtext")
    reading.add(settings(**{name: value}).splitlines())
    assert (other_layers(reading.contents.arguments) is not None) == windowed


ZERO = "[2026-01-01 10:00:00,000] [INFO] [config.py:1000:print]   "


def test_deepspeed_says_what_it_offloads_and_shards():
    device = "offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device={}, nvme_path=None) offload_param=None"
    texts = [
        f"{ZERO}zero_config .................. stage=3 {device.format(name)}\n{ZERO}zero_optimization_stage ...... 3\n"
        f"{ZERO}optimizer_name ............... adamw"
        for name in ("'cpu'", "<OffloadDeviceEnum.cpu: 'cpu'>", "'none'")
    ]
    options = []
    for text in texts:
        reading = LogReading(name="train.log", requested_dialect="deepspeed")
        reading.add(text.splitlines())
        assert evidence_of(reading.contents)[0].optimizer == "adamw"
        options.append(options_of(reading.contents.arguments))
    assert options[:2] == [{"offload_optimizer": "cpu", "zero_optimization_stage": "3"}] * 2
    assert options[2] == {"zero_optimization_stage": "3"}


def test_composer_prints_its_recomputation_and_its_adapters():
    assert evidence_by("  activation_checkpointing: true", "composer").recompute == "full"
    assert evidence_by("  activation_checkpointing: false", "composer").recompute == "none"
    reading = LogReading(name="train.log", requested_dialect="composer")
    reading.add(["    peft_type: LORA"])
    assert other_layers(reading.contents.arguments) == "peft"


def test_primus_prints_the_same_with_types():
    text = "\n".join(
        f"  {name} : {value}"
        for name, value in (
            ("bf16", "True (bool)"),
            ("fp8", "hybrid (str)"),
            ("enable_turbo_attention_float8", "True (bool)"),
            ("num_experts", "8 (int)"),
            ("moe_expert_capacity_factor", "1.25 (float)"),
        )
    )
    evidence = evidence_by(text, "primus")
    assert (evidence.matmul_dtype, evidence.attention_dtype, evidence.expert_capacity) == ("fp8", "fp8", 1.25)
