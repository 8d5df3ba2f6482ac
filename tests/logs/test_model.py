"""The model of a log is checked, never believed: arguments, parameters and TFLOP/s against the shape of the name."""

import pytest
from a_log import collect, iterations, lines_of, run_from

from tprimat.core.errors import ConfigError
from tprimat.core.models import model_shape
from tprimat.logs.shape import differences, other_work

H100 = {"gpus": 8, "accelerator": "H100 SXM"}
LLAMA = model_shape("llama-3.1-8b")


def refused(lines, model, **claims):
    with pytest.raises(ConfigError) as caught:
        run_from(lines, model, **claims)
    return caught.value


def changed(lines, **arguments):
    """The lines with other values in the argument dump."""
    for name, value in arguments.items():
        at = next(index for index, line in enumerate(lines) if f" {name} .." in line)
        lines = [*lines[:at], f"{lines[at][: lines[at].rindex('. ') + 2]}{value}", *lines[at + 1 :]]
    return lines


def dense(**others):
    """Arguments of Llama 3.1 8B as Megatron resolves them."""
    arguments = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "group_query_attention": True,
        "num_query_groups": 8,
        "kv_channels": 128,
        "swiglu": True,
        "padded_vocab_size": 128256,
        "max_position_embeddings": 8192,
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "num_experts": None,
        "multi_latent_attention": False,
        "kv_lora_rank": 32,
        "moe_router_topk": 2,
    }
    return {name: str(value) for name, value in (arguments | others).items()}


def test_a_log_of_experts_is_not_believed_to_be_llama():
    error = refused(lines_of("primus_deepseek_v2_lite"), "llama")
    assert "num_layers is 27 in the log and 32 in the model; hidden_size is 2048 in the log and 4096" in error.what
    assert "num_experts is 64 in the log and absent in the model" in error.what
    assert "train.log:25, 13, " in error.where
    assert "--model-name auto" in error.fix


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"num_experts": 32}, "moe-8.5b-a2.7b", "num_experts is 32"),
        ({"moe_router_topk": 4}, "moe-15.7b-a2.2b", "moe_router_topk is 4"),
        ({"moe_layer_freq": "[0]*2+[1]*25"}, "moe-15.2b-a2.7b", "moe_layer_freq is 2 dense layers"),
        ({"q_lora_rank": 1536}, "moe-15.7b-a2.7b", "q_lora_rank is 1536"),
        ({"moe_shared_expert_intermediate_size": "None"}, "moe-15.3b-a2.2b", "is 0 shared experts"),
    ],
)
def test_each_argument_of_experts_and_latent_attention_counts(change, name, said):
    lines = [line for line in changed(lines_of("primus_deepseek_v2_lite"), **change) if "lm loss" not in line or " 1/" in line]
    lines = [line.replace("throughput per GPU", "power of a GPU") for line in lines]
    assert said in refused(lines, "deepseek-v2-lite").what
    record = run_from(lines, "auto").record
    assert (record.model, record.ran.shape.name) == (name, name)


def test_auto_finds_the_model_of_the_configuration_and_is_not_advised_to_who_gave_it():
    lines = [f"  {name} ........ {value}" for name, value in dense().items()] + lines_of("primus_core_head")[1:]
    assert run_from(lines, "auto").record.model == "llama"
    error = refused([line.replace("(TFLOP/s/GPU): ", "(TFLOP/s/GPU): 9") for line in lines], "auto")
    assert error.what.startswith("The model of the arguments contradicts the log: its TFLOP/s are")
    assert "auto" not in error.fix
    assert "num_layers" in refused(lines_of("primus_core_head"), "auto").why, "what the log lacks"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"padded_vocab_size": 131072}, True),
        ({"padded_vocab_size": 32000}, False),
        ({"swiglu": False}, False),
        ({"num_query_groups": 4}, False),
        ({"group_query_attention": False, "num_query_groups": 1}, True),
        ({"multi_latent_attention": True}, False),
        ({"ffn_hidden_size": None}, True),
        ({"num_experts": 8}, False),
    ],
)
def test_only_what_megatron_uses_is_compared(change, same):
    assert (differences(dense(**change), LLAMA) == []) == same


@pytest.mark.parametrize(
    ("flop", "tokens", "milliseconds", "model", "sequence"),
    [
        (11.9, 246.7, 16601.3, "llama-3.1-8b", 4096),
        (567.6, 9801.4, 13372.8, "llama-3.1-8b", 8192),
        (210.5, 12130.4, 2701.3, "deepseek-v2-lite", 4096),
    ],
    ids=["causal", "full", "experts"],
)
def test_tflops_of_real_primus_logs_agree_with_the_model_and_with_no_other(flop, tokens, milliseconds, model, sequence):
    batch = round(tokens * 8 * milliseconds / 1000 / sequence)
    line = (
        "[20251121 12:10:29][rank-7/8][INFO ] [--------trainer.py:2488] :  iteration    {}/   36000 | "
        f"elapsed time per iteration (ms): {milliseconds}/2712.7 | throughput per GPU (TFLOP/s/GPU): {flop}/217.3 | "
        f"tokens per GPU (tokens/s/GPU): {tokens}/12525.5 | global batch size:   {batch} | lm loss: 2.352391E+00 |"
    )
    lines = ["a line", line.format(12125), line.format(12126)]
    assert run_from(lines, model, sequence_tokens=sequence).record.ran.shape.name == model
    other = "deepseek-v2-lite" if model.startswith("llama") else "llama-3.1-8b"
    error = refused(lines, other, sequence_tokens=sequence)
    assert error.where == "train.log:2, 3"
    assert "(causal)" in error.what
    assert "(full)" in error.what


def test_auto_takes_a_model_that_torchtitan_names_by_its_size():
    def lines(total, tflops):
        text = "\n".join(lines_of("torchtitan")).replace("8,030,261,248", total)
        for printed in ("253.41", "254.80", "254.20"):
            text = text.replace(printed, tflops)
        return text.split("\n")

    assert run_from(lines("8,030,261,248", "253.41"), "auto").record.model == "llama"
    assert run_from(lines("7,615,616,512", "237.5"), "auto").record.model == "qwen"
    error = refused(lines("8,030,261,000", "253.41"), "auto")
    assert "None of the known models has the 8,030,261,000 parameters that the log counts." in error.what
    assert error.where == "train.log:5"
    error = refused(lines_of("torchtitan_0_2"), "qwen")  # whose count is the whole model's under tensor parallelism
    assert ("the log counts 8,030,261,248" in error.what, error.where) == (True, "train.log:12")


def test_multi_token_prediction_is_refused_since_its_flop_are_not_counted():
    lines = lines_of("primus_deepseek_v2_lite")
    more = [*lines, "  mtp_num_layers .................................. 1"]
    assert "mtp_num_layers is 1 in the log and absent in the model" in refused(more, "deepseek-v2-lite").what
    assert "multi-token prediction" in refused(more, "auto").what
    none = [*lines, "  mtp_num_layers .................................. None"]
    assert run_from(none, "auto").record.model == "deepseek-v2-lite"


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("  lora.enabled            : True (bool)", True),
        ("  lora.enabled            : False (bool)", False),
        ("[INFO ] [--lora_utils.py:252] : Applying LoRA with r=32, alpha=32", True),
        ("  use_sink_attention      : True (bool)", True),
        ("  use_sink_attention      : False (bool)", False),
        ("  perform_rl_step ........ True", True),
        ("  perform_rl_step ........ False", False),
        ("  heterogeneous_layers_config_path ... None", False),
        ("  heterogeneous_layers_config_path ... /configs/puzzle.json", True),
    ],
)
def test_a_step_of_primus_that_does_other_work_is_refused(line, seen):
    lines = [*lines_of("primus_qwen3_30b_a3b")[:2], line, *lines_of("primus_qwen3_30b_a3b")[2:]]
    if seen:
        assert "The log is from " in refused(lines, "auto").what
        assert "contradicts the log" in refused(lines, "qwen3_moe").what
    else:
        assert run_from(lines, "auto").record.model == "qwen3_moe"


def test_the_size_that_megatron_estimates_is_checked_where_it_prints_no_arguments():
    lines = iterations(1, [5.0, 5.0, 5.0])
    lines.insert(1, "Total number of parameters in billions: 8.03")
    assert not any("believed" in note for note in run_from(lines, "llama", sequence_tokens=4096, **H100).notes)
    error = refused(lines, "qwen", sequence_tokens=4096, **H100)
    assert "parameters_in_billions is 8.03 in the log and 7.62 in the model" in error.what
    assert error.where == "train.log:2"
    parts = (
        "Number of parameters in transformer layers in billions: {}",
        "Number of parameters in embedding layers in billions: {}",
    )
    for layers, embeddings, fits in ((6.98, 1.05, True), (6.02, 1.05, False), (6.5, 1.53, False)):
        lines[1:2] = [parts[0].format(layers), parts[1].format(embeddings)]
        if fits:
            run_from(lines, "llama", sequence_tokens=4096, **H100)
        else:
            assert (
                f"layers_in_billions is {layers} in the log and 6.98"
                in refused(lines, "llama", sequence_tokens=4096, **H100).what
            )
        lines[1:3] = [""]


BRIDGE = (
    "Step Time : {seconds:.2f}s GPU utilization: {flop:.1f}MODEL_TFLOP/s/GPU",
    " [2025-12-22 15:18:33] iteration        {step}/     100 | elapsed time per iteration (ms): {milliseconds:.1f} | "
    "global batch size:   512 | lm loss: 1.190000E+01 | number of skipped iterations:   0 | number of nan iterations:   0 |",
)


def bridge_lines(flop_of_token, *settings):
    """Three steps on 64 GPUs, the first with its start, and settings as Megatron-Bridge prints them."""
    lines = ["model:", *(f"  {setting}" for setting in settings), "train:", "  global_batch_size: 512"]
    for step, seconds in ((7, 105.8), (8, 14.3), (9, 14.31)):
        flop = flop_of_token * 512 * 8192 / 64 / seconds / 1e12
        lines += [part.format(seconds=seconds, flop=flop, step=step, milliseconds=1000 * seconds) for part in BRIDGE]
    return lines


def test_megatron_bridge_prints_tflops_before_the_step_and_the_shape_as_yaml():
    claims = {"accelerator": "NVIDIA H200", "gpus": 64, "nodes": 8}
    lines = bridge_lines(51.5e9, "seq_length: 8192", "num_layers: 32", "hidden_size: 4096", "num_moe_experts: null")
    assert run_from(lines, "llama", **claims).record.engine == "megatron-bridge"
    assert "its TFLOP/s are those of 38 GFLOP" in refused(bridge_lines(38e9, "seq_length: 8192"), "llama", **claims).what
    lines = bridge_lines(51.5e9, "seq_length: 8192", "num_moe_experts: 8", "gated_linear_unit: false")
    error = refused(lines, "llama", **claims)
    assert "num_experts is 8" in error.what
    assert "swiglu is False" in error.what
    nested = bridge_lines(51.5e9, "seq_length: 8192", "num_layers: 32", "vision:", "  num_layers: 24")
    assert run_from(nested, "llama", **claims).record.model == "llama"


def test_maxtexts_settings_show_its_model():
    names = ("num_decoder_layers", "emb_dim", "mlp_dim", "num_query_heads", "num_kv_heads", "num_experts")
    shape = dict(zip(names, (32, 4096, 14336, 32, 8, 1), strict=True))
    lines = [f"Config param {name}: {value}" for name, value in shape.items()]
    lines += [line for line in lines_of("maxtext") if "completed step" not in line]
    lines += [f"completed step: {number}, seconds: 5.66, loss: 12.0" for number in range(5)]
    assert not any("believed" in note for note in run_from(lines, "llama", accelerator="H100 SXM").notes)
    mixture = [line.replace("num_experts: 1", "num_experts: 8") for line in lines]
    assert "num_experts is 8" in refused(mixture, "llama", accelerator="H100 SXM").what
    for name, value, windowed in (
        ("attention_type", "AttentionType.LOCAL_SLIDING", True),
        ("attention_type", "AttentionType.GLOBAL", False),
        ("decoder_block", "DecoderBlockType.GEMMA3", True),
        ("moba", True, True),
        ("moba", False, False),
    ):
        arguments = collect([f"I0317 pyconfig.py:413] Config param {name}: {value}"], "maxtext").arguments
        assert (other_work(arguments) is not None) == windowed, (name, value)


def test_a_device_whose_memory_is_not_that_of_its_name_has_no_row():
    begin = "[rank0]:[titan] 2026-02-24 19:46:17,508 - root - INFO - "
    for capacity, name, platform in (
        ("GPU capacity: NVIDIA H100 with 95.04GiB memory", "NVIDIA H100 of 95.04 GiB", "cuda"),
        ("CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory", "NVIDIA H100 80GB HBM3", "cuda"),
        ("NPU capacity: Ascend910B3 with 60.97GiB memory", "Ascend910B3", "other"),
        ("MLU capacity: MLU590 with 79.00GiB memory", "MLU590", "other"),
    ):
        steps = [f"{begin}step: {n:2}  loss: {9 - n / 20:8.5f}  memory: 6.91GiB  tps: 6,790" for n in range(1, 5)]
        machine = run_from([begin + capacity, *steps], "llama-3.1-8b", gpus=8).record.machine
        assert (machine.accelerator, machine.platform) == (name, platform)


def test_what_a_log_prints_of_torch_and_of_the_driver_must_be_of_the_accelerator_that_is_named():
    steps = iterations(1, [5.0, 5.0, 5.0])
    table = "| N/A   34C    P0             72W /  700W |       1MiB /  {}MiB |      0%      Default |"
    for right, wrong, line in (
        ("H100", "MI300X", "PyTorch version: 2.9.0+cu128"),
        ("H100", "MI300X", "NCCL version 2.26.2+cuda12.8"),
        ("MI300X", "H100", "torch 2.9.0+rocm6.4.1"),
        ("MI300X", "H100", "device gfx942:sramecc+:xnack-"),
        ("H100", "H200", table.format(81559)),
        ("H200", "H100", table.format(143771)),
    ):
        claims = {"gpus": 8, "sequence_tokens": 4096}
        assert run_from([line, *steps], "llama", accelerator=right, **claims).steps
        assert f"--gpu {wrong} contradicts the log" in refused([line, *steps], "llama", accelerator=wrong, **claims).what
