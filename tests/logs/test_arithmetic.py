"""Two logs whose work or arithmetic differs in one argument are never repetitions, and compare.py says what differs."""

from dataclasses import replace

import pytest
from a_log import evidence_by, lines_of, run_from
from commands import run_command

from tprimat.analyze.metrics import run_metrics
from tprimat.logs.arguments import arithmetic_of
from tprimat.records.benchmark_file import write_benchmark_file

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
TITAN = "[rank0]:[titan] 2026-01-01 10:00:00,123 - root - INFO - "


def rows(arguments):
    return [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]


def mixtral(**arguments):
    """The run of a log of Mixtral with further arguments, which the dump's later rows override."""
    lines = lines_of("megatron_lm_mixtral")
    end = next(index for index, line in enumerate(lines) if "----- end of arguments" in line)
    lines[end:end] = rows(PRINTED | arguments)
    return run_from(lines, "auto", accelerator="H100 SXM", nodes=2)


def compared(tmp_path, *runs):
    """What compare.py says of runs."""
    folders = [tmp_path / str(number) for number in range(len(runs))]
    for number, (folder, run) in enumerate(zip(folders, runs, strict=True)):
        folder.mkdir()
        slower = [1 + 0.01 * (number + step.step % 2 * number) for step in run.steps]  # the same times would be a copy
        steps = [replace(step, step_seconds=by * step.step_seconds) for step, by in zip(run.steps, slower, strict=True)]
        write_benchmark_file(folder / "benchmark_cuda_m.json", run.record, steps, run_metrics(run.record, steps))
    done = run_command("compare.py", "--results-dir", *folders, "--output", tmp_path / "x.md")
    return " ".join(done.stdout.split())


FP8 = {"fp8": "hybrid"}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "torch.bfloat16"}


@pytest.mark.parametrize(
    ("both", "other", "said"),
    [
        ({}, NARROW, "above: optimizer states in fp32 with moments in bf16 against"),
        ({}, {"reset_attention_mask": True}, "4,096 packed against"),
        (FP8, {"fp8_wgrad": False}, "above: dtype fp8 except in weight gradients against fp8"),
        ({}, {"moe_router_force_biased": 0.5}, "above: routing biased against natural"),
        ({}, {"grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": False}, "differ in gradients"),
        ({}, {"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True"),
    ],
)
def test_an_argument_that_changes_the_work_or_the_arithmetic_is_named(both, other, said, tmp_path):
    words = compared(tmp_path, mixtral(**both), mixtral(**both, **other))
    assert said in words, words
    assert "mean of 2 runs" not in words


@pytest.mark.parametrize(
    ("layers", "stages", "recompute", "first"),
    [(12, 1, "full", 12), (32, 1, "full", None), (8, 4, "full", None), (7, 4, "full", 7), (0, 1, "none", None)],
)
def test_the_layers_of_the_block_method_are_read(layers, stages, recompute, first):
    """Megatron recomputes the first of each stage; AMD's recipes name all 80 layers of a model, or none."""
    arguments = {"recompute_method": "block", "recompute_num_layers": str(layers), "num_layers": "32"}
    facts = arithmetic_of(arguments, {"recompute": "full", "pipeline_parallel": stages})
    assert (facts.get("recompute", "full"), facts.get("recompute_layers")) == (recompute, first)


def test_megatron_says_its_options_and_its_optimizer():
    record = mixtral(**FP8, te_precision_config_file="some.yaml", moe_expert_rank_capacity_factor=1.5).record
    assert (record.ran.expert_capacity, record.ran.wider_parts) == (1.5, ("what some.yaml names",))
    options = record.engine_options
    assert (options["overlap_grad_reduce"], options["recompute_modules"]) == (True, "core_attn")
    assert "te_precision_config_file" not in options
    assert (record.evidence.workload.optimizer_states, record.evidence.workload.gradient_dtype) == ("fp32", "float32")


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
    assert evidence_by(rows(arguments), "megatron-lm").workload.gradient_dtype == gradients


@pytest.mark.parametrize(
    ("arguments", "narrow"),
    [
        ({"fp8": "hybrid"}, ("fp8", None, None, None)),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_dot_product_attention": False}, ("fp8", "current", None, None)),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_multi_head_attention": True}, ("fp8", "delayed", "fp8", None)),
        ({"fp8": "hybrid", "num_layers_at_start_in_bf16": 1, "first_last_layers_bf16": False}, ("fp8", None, None, 0)),
        (
            {"fp8": "e4m3", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 2},
            ("fp8", None, None, 2),
        ),
        ({"fp8": None, "fp8_recipe": "delayed", "fp8_multi_head_attention": True}, ("bf16", None, None, None)),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4", "first_last_layers_bf16": False}, ("fp4", "nvfp4", None, 0)),
        ({"fp4": "mxfp4", "fp4_recipe": "mxfp4", "first_last_layers_bf16": True}, ("fp4", "mxfp4", None, 2)),
    ],
)
def test_megatrons_arguments_tell_what_fp8_is(arguments, narrow):
    proof = evidence_by(rows({"bf16": True, **arguments}), "megatron-lm")
    assert (
        proof.workload.matmul_dtype,
        proof.workload.fp8_scaling,
        proof.workload.attention_dtype,
        proof.workload.layers_in_bf16,
    ) == narrow


SINGLE = "Float8 training active with recipe rowwise"
GROUPED = "Converted GroupedExperts to use dynamic float8 rowwise quantization with scaled grouped GEMMs"


@pytest.mark.parametrize(
    ("lines", "narrow"),
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
def test_torchtitan_says_what_is_in_fp8(lines, narrow):
    proof = evidence_by([TITAN + line for line in lines], "torchtitan")
    assert (proof.workload.matmul_dtype, proof.workload.fp8_scaling, proof.workload.wider_parts) == narrow


def maxtext(**values):
    prefix = "I0317 09:59:16.241972 1234 pyconfig.py:413] Config param"
    return evidence_by([f"{prefix} {name}: {value}" for name, value in values.items()], "maxtext")


def test_maxtext_says_how_it_computes_in_words_or_members_of_enumerations():
    for quantization, dtype, scaling in (
        ("none", "bf16", None),
        ("fp8_full", "fp8", None),
        ("te_fp8_currentscaling", "fp8", "current"),
        ("te_nvfp4", "fp4", "nvfp4"),
    ):
        for value in (quantization, f"QuantizationType.{quantization.upper()}"):
            proof = maxtext(dtype="bfloat16", quantization=value)
            assert (proof.workload.matmul_dtype, proof.workload.fp8_scaling) == (dtype, scaling), value
    for values, states in (
        ({"mu_dtype": "bfloat16", "weight_dtype": "float32"}, "fp32 with moments in bf16 and fp32"),
        ({"weight_dtype": "bfloat16"}, "bf16"),
        ({}, None),
    ):
        assert maxtext(**values).workload.optimizer_states == states
    proof = maxtext(
        attention="cudnn_flash_te",
        capacity_factor=1.25,
        dataset_type="DatasetType.SYNTHETIC",
        grad_dtype="bfloat16",
        num_experts=8,
        opt_type="OptimizerType.ADAMW",
        remat_policy="minimal",
        use_random_routing=True,
    )
    seen = proof.workload.attention, proof.workload.gradient_dtype, proof.workload.data
    assert seen == ("cudnn_flash_te", "bfloat16", "mock")
    settings = proof.workload.optimizer, proof.workload.recompute, proof.workload.routing, proof.workload.expert_capacity
    assert settings == ("adamw", "selective", "balanced", 1.25)
