"""The model of a log is checked, never believed: arguments, parameters and TFLOP/s against the shape of the name."""

from dataclasses import replace
from pathlib import Path

import pytest

from tprimat.config.load import load_config
from tprimat.core.errors import ConfigError
from tprimat.core.flops import flop_per_token
from tprimat.core.models import model_shape
from tprimat.logs.claims import Flags
from tprimat.logs.extract import extract
from tprimat.logs.formats.megatron_lm import teraflops
from tprimat.logs.parse import LogReading
from tprimat.logs.shape import differences, shape_of_arguments
from tprimat.records.schema import LogSource

LOGS = Path(__file__).parent
CONFIG = load_config()


def lines_of(name):
    return (LOGS / f"{name}.log").read_text(encoding="utf8").splitlines()


def run_of(lines, model, **flags):
    reading = LogReading(name="train.log")
    reading.add(list(lines))
    return extract(reading, Flags(model=model, **flags), LogSource(path="train.log"), CONFIG).run


def refused(lines, model, **flags):
    with pytest.raises(ConfigError) as caught:
        run_of(lines, model, **flags)
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


def test_auto_takes_the_shape_and_its_known_name_from_the_arguments():
    run = run_of(lines_of("primus_deepseek_v2_lite"), "auto")
    assert (run.model, run.shape) == ("deepseek-v2-lite", model_shape("deepseek-v2-lite"))
    assert (run.expert_parallel, run.evidence.parameters) == (8, None)


def test_the_argument_dump_outranks_the_settings_around_it():
    run = run_of(lines_of("primus_deepseek_v2_lite"), "auto")
    assert (run.sequence_tokens, run.shape.layers) == (4096, 27)
    assert (run.matmul_dtype, run.recompute, run.evidence.transformer_engine) == ("bf16", "full", True)


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"num_experts": 32}, "moe-8.5b-a2.7b", "num_experts is 32"),
        ({"moe_router_topk": 4}, "moe-15.7b-a2.2b", "moe_router_topk is 4"),
        ({"moe_layer_freq": "[0]*2+[1]*25"}, "moe-15.2b-a2.7b", "moe_layer_freq is 2 dense layers"),
        ({"q_lora_rank": 1536}, "moe-15.7b-a2.7b", "q_lora_rank is 1536"),
        ({"moe_shared_expert_intermediate_size": "None"}, "moe-15.3b-a2.2b", "moe_shared_expert_intermediate_size is None"),
    ],
)
def test_each_argument_of_experts_and_latent_attention_counts(change, name, said):
    lines = [line for line in changed(lines_of("primus_deepseek_v2_lite"), **change) if "lm loss" not in line or " 1/" in line]
    lines = [line.replace("throughput per GPU", "power of a GPU") for line in lines]
    assert said in refused(lines, "deepseek-v2-lite").what
    run = run_of(lines, "auto")
    assert (run.model, run.shape.name) == (name, name)


@pytest.mark.parametrize(("factor", "capacity"), [("1.25", 1.25), ("None", "unlimited"), ("-1.0", "unlimited")])
def test_what_an_expert_takes_is_read(factor, capacity):
    assert (
        run_of(changed(lines_of("primus_qwen3_30b_a3b"), moe_expert_capacity_factor=factor), "auto").expert_capacity == capacity
    )


def test_auto_finds_the_model_of_the_configuration():
    lines = [f"  {name} ........ {value}" for name, value in dense().items()] + lines_of("primus_core_head")[1:]
    assert run_of(lines, "auto").model == "llama"
    assert shape_of_arguments(dense()).layers == 32


def test_a_model_cut_to_a_few_layers_is_another_model():
    arguments = dense(num_layers=4, hidden_size=16384, ffn_hidden_size=53248, num_attention_heads=128)
    shape = shape_of_arguments(arguments)
    assert shape.name == "dense-17.0b"
    assert flop_per_token(shape, 8192) == flop_per_token(replace(model_shape("llama-3.1-405b"), layers=4), 8192)
    found = [difference.argument for difference in differences(arguments, model_shape("llama-3.1-405b"))]
    assert found == ["num_layers"]


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
    assert (differences(dense(**change), model_shape("llama-3.1-8b")) == []) == same


def test_a_log_that_lacks_the_shape_says_what_is_missing():
    assert "num_layers" in refused(lines_of("primus_core_head"), "auto").why


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
    gpus = 8
    batch = round(tokens * gpus * milliseconds / 1000 / sequence)
    line = (
        "[20251121 12:10:29][rank-7/8][INFO ] [--------trainer.py:2488] :  iteration    {}/   36000 | "
        f"elapsed time per iteration (ms): {milliseconds}/2712.7 | throughput per GPU (TFLOP/s/GPU): {flop}/217.3 | "
        f"tokens per GPU (tokens/s/GPU): {tokens}/12525.5 | global batch size:   {batch} | lm loss: 2.352391E+00 |"
    )
    lines = ["a line", line.format(12125), line.format(12126)]
    assert run_of(lines, model, sequence_tokens=sequence).shape.name == model
    other = "deepseek-v2-lite" if model.startswith("llama") else "llama-3.1-8b"
    error = refused(lines, other, sequence_tokens=sequence)
    assert error.where == "train.log:2-3"
    assert "(causal)" in error.what
    assert "(full)" in error.what


def test_the_arguments_of_megatron_deepspeed_and_gpt_neox_are_read_too():
    timer = "[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step={}, CurrSamplesPerSec=25.7"
    batch = ["  train_batch_size ........ 32", "  world_size .............. 8"]
    flags = {"accelerator": "MI300X", "sequence_tokens": 4096}
    lines = [*batch, "  num_layers ...................... 44........updated", timer.format(10), timer.format(20)]
    assert refused(lines, "llama", **flags).what.startswith("--model-name llama contradicts the log: num_layers is 44")
    assert run_of([line.replace(" 44.", " 32.") for line in lines], "llama", **flags).engine == "deepspeed"


def torchtitan(total="8,030,261,248", tflops=253.41):
    """torchtitan names its model by its size alone."""
    return [
        line.replace("8,030,261,248", total)
        .replace("253.41", str(tflops))
        .replace("254.80", str(tflops))
        .replace("254.20", str(tflops))
        for line in lines_of("torchtitan")
    ]


def test_auto_takes_a_model_that_torchtitan_names_by_its_size():
    assert run_of(torchtitan(), "auto").model == "llama"
    assert run_of(torchtitan("7,615,616,512", 237.5), "auto").model == "qwen"
    error = refused(torchtitan("8,030,261,000"), "auto")
    assert "None of the known models has the 8,030,261,000 parameters that the log counts." in error.what
    assert error.where == "train.log:5"


def test_multi_token_prediction_is_refused_since_its_flop_are_not_counted():
    lines = lines_of("primus_deepseek_v2_lite")
    lines = [*lines, "  mtp_num_layers .................................. 1"]
    assert "mtp_num_layers is 1 in the log and 0 in the model" in refused(lines, "deepseek-v2-lite").what
    assert "multi-token prediction" in refused(lines, "auto").what
    without = [*lines_of("primus_deepseek_v2_lite"), "  mtp_num_layers .................................. None"]
    assert run_of(without, "auto").model == "deepseek-v2-lite"


NEOX = (
    " samples/sec: {rate:.3f} | iteration {number:8d}/  320000 | elapsed time per iteration (ms): 10000.0 | "
    "learning rate: 1.0E-05 | approx flops per GPU: {flop:.1f}TFLOPS | lm_loss: 7.1E+00 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.mark.parametrize(
    ("recomputes", "factor", "accepted"), [(True, 4 / 3, True), (True, 1.0, True), (False, 4 / 3, False), (False, 1.0, True)]
)
def test_gpt_neox_counts_recomputation_and_is_checked_with_it(recomputes, factor, accepted):
    flop = flop_per_token(model_shape("llama-3.1-8b"), 2048, "full") * 12.8 * 2048 / 8 / 1e12 * factor
    lines = [
        TIMER_LINE,
        "  train_batch_size ........ 128",
        "  world_size .............. 8",
        f"  checkpoint_activations ........ {recomputes}",
        *(NEOX.format(rate=12.8, number=number, flop=flop) for number in (10, 20)),
    ]
    flags = {"accelerator": "MI300X", "sequence_tokens": 2048}
    if accepted:
        assert run_of(lines, "llama", **flags).engine == "deepspeed"
    else:
        assert "contradicts the log's TFLOP/s" in refused(lines, "llama", **flags).what


TIMER_LINE = "[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=20, CurrSamplesPerSec=12.8"


@pytest.mark.parametrize(
    ("text", "value"), [("37.9TFLOPS", 37.9), ("500.0GFLOPS", 0.5), ("12.0FLOPS", 12e-12), ("nan", None), (None, None)]
)
def test_flops_as_gpt_neox_prints_them(text, value):
    assert teraflops(text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (1.5, False)])
def test_nanotrons_own_tflops_are_checked(factor, accepted):
    flop = flop_per_token(model_shape("llama-3.1-8b"), 4096, "causal") * 7790 / 1e12 * factor
    lines = [line.replace("model_tflops_per_gpu: 363", f"model_tflops_per_gpu: {flop:.0f}") for line in lines_of("nanotron")]
    lines = [line for line in lines if "iteration: 1 /" not in line and "iteration: 3 /" not in line]
    flags = {"accelerator": "NVIDIA H100 80GB HBM3", "gpus": 8}
    if accepted:
        assert run_of(lines, "llama", **flags).engine == "nanotron"
    else:
        assert "contradicts the log's TFLOP/s" in refused(lines, "llama", **flags).what


BRIDGE = (
    "Step Time : {seconds:.2f}s GPU utilization: {flop:.1f}MODEL_TFLOP/s/GPU",
    " [2025-12-22 15:18:33] iteration        {step}/     100 | elapsed time per iteration (ms): {milliseconds:.1f} | "
    "global batch size:   512 | lm loss: 1.190000E+01 | number of skipped iterations:   0 | number of nan iterations:   0 |",
)


def bridge_lines(flop_per_token, *settings):
    """Two steps on 64 GPUs, the first with its start, and settings as Megatron-Bridge prints them."""
    lines = ["model:", *(f"  {setting}" for setting in settings), "train:", "  global_batch_size: 512"]
    for step, seconds in ((7, 105.8), (8, 14.3), (9, 14.31)):
        flop = flop_per_token * 512 * 8192 / 64 / seconds / 1e12
        lines += [part.format(seconds=seconds, flop=flop, step=step, milliseconds=1000 * seconds) for part in BRIDGE]
    return lines


def test_megatron_bridge_prints_tflops_before_the_step_and_the_shape_as_yaml():
    flags = {"accelerator": "NVIDIA H200", "gpus": 64, "nodes": 8}
    lines = bridge_lines(51.5e9, "seq_length: 8192", "num_layers: 32", "hidden_size: 4096", "num_moe_experts: null")
    assert run_of(lines, "llama", **flags).engine == "megatron-bridge"
    assert "TFLOP/s: they are those of 38 GFLOP" in refused(bridge_lines(38e9, "seq_length: 8192"), "llama", **flags).what
    lines = bridge_lines(51.5e9, "seq_length: 8192", "num_moe_experts: 8", "gated_linear_unit: false")
    error = refused(lines, "llama", **flags)
    assert "num_experts is 8" in error.what
    assert "swiglu is False" in error.what
    nested = bridge_lines(51.5e9, "seq_length: 8192", "num_layers: 32", "vision:", "  num_layers: 24")
    assert run_of(nested, "llama", **flags).model == "llama"


def test_torchtitans_count_is_the_whole_models_under_tensor_parallelism():
    lines = lines_of("torchtitan_0_2")
    assert run_of(lines, "llama").evidence.parameters == 8_030_261_248
    error = refused(lines, "qwen")
    assert "the log counts 8,030,261,248" in error.what
    assert error.where == "train.log:12"


def test_a_log_from_before_swiglu_was_an_argument_has_the_model_that_every_log_had():
    run = run_of(lines_of("megatron_lm_2021"), "auto", nodes=16, accelerator="Tesla V100-SXM2-32GB")
    shape = run.shape
    assert (shape.layers, shape.hidden, shape.ffn, shape.heads, shape.vocabulary) == (64, 8192, 32768, 32, 50688)
    assert (shape.gated, shape.norm, shape.position, shape.linear_bias, shape.tied_embeddings) == (
        False,
        "layernorm",
        "learned",
        True,
        True,
    )
    assert run.model == "dense-52.0b"
    of_2020 = [line for line in lines_of("megatron_lm_2021") if "ffn_hidden_size" not in line]
    assert run_of(of_2020, "auto", nodes=16, accelerator="Tesla V100-SXM2-32GB").shape == shape
    error = refused(lines_of("megatron_lm_2021"), "llama", nodes=16, accelerator="Tesla V100-SXM2-32GB")
    assert "swiglu is False in the log and True in the model" in error.what


def test_a_dump_that_is_cut_implies_nothing():
    lines = [line for line in lines_of("megatron_lm_2021") if "- arguments -" not in line]
    error = refused(lines, "auto", nodes=16, accelerator="Tesla V100-SXM2-32GB")
    assert "swiglu" in error.why


def test_the_size_that_megatron_estimates_is_checked_where_it_prints_no_arguments():
    text = " iteration {:8d}/ 60 | elapsed time per iteration (ms): 5000.0 | global batch size: 128 | lm loss: 2.0 |"
    lines = [text.format(1), "Total number of parameters in billions: 8.03", text.format(2), text.format(3)]
    flags = {"gpus": 8, "sequence_tokens": 4096, "accelerator": "H100 SXM"}
    assert not any("believed" in note for note in run_of(lines, "llama", **flags).evidence.notes)
    error = refused(lines, "qwen", **flags)
    assert "parameters_in_billions is 8.03 in the log and 7.62 in the model" in error.what
    assert error.where == "train.log:2"


@pytest.mark.parametrize(
    ("printed", "said"),
    [("mtp_1 loss: 2.87E+00", "mtp_num_layers is 1"), ("reward: 7.6E-01 | kl: 1.1E-02", "reward is printed")],
)
def test_the_iteration_line_may_show_work_that_is_not_counted(printed, said):
    text = " iteration {:8d}/ 60 | elapsed time per iteration (ms): 5000.0 | global batch size: 128 | lm loss: 2.0 | {} |"
    lines = [text.format(number, printed) for number in range(1, 4)]
    assert said in refused(lines, "llama", gpus=8, sequence_tokens=4096, accelerator="H100 SXM").what


@pytest.mark.parametrize(
    "name", ["hybrid_override_pattern", "hybrid_layer_pattern", "window_size", "experimental_attention_variant"]
)
def test_layers_other_than_full_attention_are_refused_whatever_the_name(name):
    arguments = dense(**{name: "M-M*"})
    assert [difference.argument for difference in differences(arguments, model_shape("llama-3.1-8b"))] == [name]
    with pytest.raises(ConfigError, match="layers other than full attention"):
        shape_of_arguments(arguments)
    assert differences(dense(**{name: None}), model_shape("llama-3.1-8b")) == []


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
        ("  attention_output_gate .. True", True),
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
        assert run_of(lines, "auto").model == "qwen3_moe"


def test_padded_and_packed_sequences_of_primus_are_said_to_be_so():
    rows = ["  stage : sft (str)", "  use_packed_attention : True (bool)"]
    notes = "; ".join(run_of([*rows, *lines_of("primus_qwen3_30b_a3b")], "auto").evidence.notes)
    assert "tokens include padding" in notes
    assert "attention ends at each document" in notes


def nanotron(tokens_per_second):
    step = "iteration: {} / 9 | time_per_iteration_ms: 4.21K | tokens_per_sec_per_gpu: {} | global_batch_size: 64 | lm_loss: 11.1"
    return ["dp=4, pp=1, tp=2, sequence_length=4096"] + [step.format(number, tokens_per_second) for number in range(1, 10)]


def test_token_rates_that_contradict_the_times_are_refused():
    error = refused(nanotron("15.6K"), "llama", gpus=8, accelerator="H100 SXM")
    assert "step 5 has 15,600 tokens/s/GPU" in error.what
    assert "make 7,783" in error.what
    assert error.where == "train.log:6"


def test_a_model_that_nothing_in_the_log_shows_is_said_to_be_believed():
    run = run_of(nanotron("7.79K"), "qwen", gpus=8, accelerator="H100 SXM")
    assert "caution: nothing in the log shows which model ran; --model-name qwen is believed" in run.evidence.notes
    assert not any("believed" in note for note in run_of(lines_of("primus_deepseek_v2_lite"), "auto").evidence.notes)


def test_maxtexts_settings_show_its_model():
    shape = {
        "num_decoder_layers": 32,
        "emb_dim": 4096,
        "mlp_dim": 14336,
        "num_query_heads": 32,
        "num_kv_heads": 8,
        "num_experts": 1,
    }
    lines = [f"Config param {name}: {value}" for name, value in shape.items()]
    lines += [line for line in lines_of("maxtext") if "completed step" not in line]
    lines += [f"completed step: {number}, seconds: 5.66, loss: 12.0" for number in range(5)]
    run = run_of(lines, "llama", accelerator="H100 SXM")
    assert not any("believed" in note for note in run.evidence.notes)
    mixture = [line.replace("num_experts: 1", "num_experts: 8") for line in lines]
    assert "num_experts is 8" in refused(mixture, "llama", accelerator="H100 SXM").what


def test_auto_is_not_advised_to_who_gave_it():
    lines = [f"  {name} ........ {value}" for name, value in dense().items()] + lines_of("primus_core_head")[1:]
    fast = [line.replace("(TFLOP/s/GPU): ", "(TFLOP/s/GPU): 9") for line in lines]
    error = refused(fast, "auto")
    assert error.what.startswith("The model of the arguments contradicts the log's TFLOP/s")
    assert "auto" not in error.fix
