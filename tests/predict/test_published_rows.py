"""Rows that others bring: published results in their publishers' words, and Megatron-LM's tests with options of all kinds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.megatron_options import workload_of_options
from benchmarks.published_scores import guess_of, result_of
from tprimat.core.errors import RecordError

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "benchmarks" / "records" / "megatron-goldens" / "rows.jsonl"
ROW = {
    "source": "a page",
    "framework": "Megatron-Bridge",
    "date": "2026-06",
    "model": "Llama3-8B",
    "accelerator": "DGX-H100",
    "gpus": 8,
    "dtype": "BF16",
    "sequence": 8192,
    "micro_batch": 1,
    "global_batch": 128,
    "tp": 1,
    "pp": 1,
    "cp": 2,
}
MIXTURE = {"model": "Qwen3_30B_a3B", "gpus": 16, "sequence": 4096, "global_batch": 1024, "cp": 1, "ep": 16}
OPTIONS = {
    "num-layers": 12,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "seq-length": 1024,
    "micro-batch-size": 4,
    "global-batch-size": 32,
}


def guess(**changes):
    return guess_of(result_of({**ROW, **changes}, 1))


def test_rows_of_both_formats_come_back_with_predictions_and_a_reason_where_there_is_none(tmp_path):
    measured = [json.loads(line) for line in GOLDENS.read_text(encoding="utf8").splitlines()[:3]]
    rows = [
        {**ROW, "tokens_per_second_per_gpu": 10254},
        {**ROW, "model": "Nemotron 3 Nano", "tp": float("nan")},
        {**ROW, "gpus": "8x"},
        {"case": "one", "machine": "h100", "options": OPTIONS},
        {"case": "mine", "machine": "unknown", "options": {"num-layers": 2}},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, *measured]))
    command = [sys.executable, "benchmarks/accuracy.py", "--rows", file, "--json"]
    document = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    known, hybrid, odd, golden, bad, *others = document["rows"]
    assert [{key: row[key] for key in measured[0]} for row in others] == measured
    assert all(row["predicted_peak_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=0.1) for row in others)
    assert all(row["predicted_step_seconds"] > 0 for row in others)
    assert document["groups"]["rows_memory"]["over 4 GB"]["raw"]["rows"] == 3
    assert (bad["predicted_peak_bytes"], bad["predicted_step_seconds"], "micro-batch-size" in bad["error"]) == (None, None, True)
    assert known["interval"][0] < 10254 < known["interval"][1]
    assert known["predicted_tokens_per_second_per_gpu"] == pytest.approx(10254, rel=0.08)
    assert 50 * 2**30 < known["predicted_peak_bytes"] < 80 * 2**30
    assert ("Mamba-2" in hybrid["error"], "8x" in odd["error"], hybrid["interval"]) == (True, True, None)
    assert golden["step_interval"][0] < golden["predicted_step_seconds"] < golden["step_interval"][1]


@pytest.mark.parametrize(
    ("changes", "model", "precision"),
    [
        ({"model": "meta-llama/Meta-Llama-3-8B", "dtype": "FP8-CS"}, "llama-3-8b", "fp8"),
        (
            {"model": "Llama 3.1 70B", "gpus": 64, "accelerator": "GB200 NVL72", "dtype": "NVFP4", "cp": 1, "tp": 4},
            "llama-3.1-70b",
            "nvfp4",
        ),
        ({**MIXTURE, "model": "Qwen3 MoE 30B", "accelerator": "DGX B300", "dtype": "FP8-MX"}, "qwen3-30b-a3b", "mxfp8"),
        ({**MIXTURE, "model": "GPT OSS 120B", "accelerator": "GB300", "gpus": 64, "dtype": "MXFP8"}, "gpt-oss-120b", "mxfp8"),
        ({"model": "Llama 2 7B", "dtype": "fp16"}, "llama-2-7b", "fp16"),
        ({"model": "Nemotron-340B", "accelerator": "GB200", "gpus": 128, "tp": 8, "pp": 4, "cp": 1}, "nemotron-4-340b", "bf16"),
        ({"model": "LLAMA3-405B", "accelerator": "B200", "gpus": 128, "tp": 4, "pp": 8}, "llama-3.1-405b", "bf16"),
    ],
)
def test_names_of_publishers_are_understood(changes, model, precision):
    guessed = guess(**changes)
    assert (guessed.workload.shape.name, guessed.workload.format) == (model, precision)
    assert guessed.fits


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "DeepSeek V3.2"}, "indexer"),
        ({"model": "Nemotron V3 Nano 30B (26.02)"}, "Mamba-2"),
        ({"note": "LoRA"}, "LoRA"),
        ({"dtype": "int3"}, "int3"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_a_sentence(change, why):
    with pytest.raises(RecordError) as refused:
        guess(**change)
    assert why in refused.value.why


def test_what_a_source_writes_for_nothing_is_not_known_and_its_container_is_its_date():
    written = {"vpp": "n/a", "pp": "-", "ep": "n/a", "gpus": "8", "global_batch": "1,024"}
    row = result_of({**ROW, **written, "version": "nemo 26.02", "date": "2026-08"}, 1)
    assert (row.workload.virtual_pipeline, row.workload.pipeline_parallel, row.gpus) == (None, None, 8)
    assert (row.workload.global_batch_sequences, row.date) == (1024, "2026-02")


def test_what_stands_in_brackets_and_the_printed_flop_say_what_ran():
    deepseek = {**MIXTURE, "model": "DeepSeekV3 (tokendrop)", "gpus": 256, "pp": 4, "ep": 64, "tokens_per_second_per_gpu": 1000}
    work = result_of({**ROW, **deepseek, "tflops_as_published": 250}, 1).workload
    assert (work.shape.name, work.expert_capacity, work.mtp_layers) == ("deepseek-v3", 1.0, None)
    assert result_of({**ROW, **deepseek, "tflops_as_published": 260}, 1).workload.mtp_layers == 1
    assert result_of({**ROW, **deepseek, "model": "DeepSeekV3 (w/ MTP)"}, 1).workload.mtp_layers == 1
    further = guess(**{**deepseek, "accelerator": "GB200", "vpp": 4}, tflops_as_published=260).workload
    assert further.chunk_layers == (*[4] * 15, 1)  # the layer of multi-token prediction takes the place of three


def test_a_local_batch_of_torchtitan_goes_through_the_pipeline_one_by_one_or_earlier_in_as_many_parts_as_stages():
    titan = {
        "framework": "torchtitan",
        "model": "Llama 3.1 405B",
        "gpus": 512,
        "tp": 8,
        "pp": 8,
        "cp": 1,
        "note": "FSDP, full AC",
    }
    work = guess(**titan, micro_batch=32, global_batch=None).workload
    assert (work.micro_batch, work.global_batch_sequences, work.recompute, work.code.shards_weights) == (1, 256, "full", False)
    assert guess(**titan, micro_batch=32, global_batch=None, date="2024-12").workload.micro_batch == 4


def test_a_graph_of_the_whole_step_needs_a_release_that_has_it_and_a_forced_balance():
    mixture = {**MIXTURE, "gpus": 8, "ep": 8, "micro_batch": 4, "accelerator": "GB200", "dtype": "MXFP8"}

    def host(**changes):
        return guess(**{**mixture, **changes}).prediction.time.parts["host"]

    assert host(routing="forced") == 0.0
    assert host(routing="natural") > 0.0
    assert host(routing="forced", date="2026-04") > 0.0


def test_weights_are_split_over_replicas_where_a_framework_does_so_or_nothing_else_fits():
    assert guess(framework="torchtitan", cp=None).workload.code.shards_weights
    assert guess(note="FSDP 8").workload.code.shards_weights
    assert not guess().workload.code.shards_weights
    large = guess(model="Llama 3 70B", gpus=64, accelerator="GB200", micro_batch=2, global_batch=256, cp=1)
    assert large.workload.code.shards_weights
    assert large.fits


def test_natural_routing_takes_half_as_long_again_on_sixteen_h100():
    """Megatron-Bridge's model card: 299 TFLOP/s balanced by force, 199 natural; not part of the calibration."""
    tuned = {**MIXTURE, "note": "HybridEP, CUDA graphs of the router"}
    rates = [guess(**tuned, routing=routing).prediction.time.tokens_per_second_per_gpu for routing in ("forced", "natural")]
    assert rates[0] / rates[1] == pytest.approx(299 / 199, rel=0.15)


def test_the_host_bounds_small_batches_of_recipes_that_are_not_tuned():
    """Our Megatron-Core took 12 ms a layer of experts besides the experts' calls, and no dense layer more than 5.5."""
    small = {**MIXTURE, "sequence": 512, "micro_batch": 1, "ep": 8, "gpus": 8}
    micro_batches, layers = 1024 / 8, 48
    for note, least, most in (("SFT", 12e-3, 16e-3), ("", 2e-3, 5e-3)):
        step = guess(**small, note=note).prediction.time.step_seconds
        assert least < step / micro_batches / layers < most
    dense = guess(note="SFT", sequence=256, cp=1).prediction.time.step_seconds / 16 / 32
    assert 4e-3 < dense < 5.5e-3


def test_tensor_ranks_of_torchtitan_wait_for_each_other_less_where_they_exchange_asynchronously():
    titan = {"framework": "torchtitan", "gpus": 64, "tp": 8, "cp": 1, "micro_batch": 12, "global_batch": 96}
    waited = {note: guess(**titan, note=f"{note}, SAC").prediction.time.parts["tensor"] for note in ("FSDP", "FSDP, async TP")}
    assert waited["FSDP, async TP"] == pytest.approx(0.7 * waited["FSDP"])
    fp8 = guess(**titan, note="FSDP, SAC", dtype="float8").prediction.time.parts["tensor"]
    assert 0.6 * waited["FSDP"] < fp8 < 0.9 * waited["FSDP"]  # inputs are gathered in 8 bits, results scattered in 16


def test_a_pipeline_schedule_that_is_named_is_not_interleaved():
    stages = {"framework": "torchtitan", "gpus": 64, "pp": 8, "cp": 1}
    assert guess(**stages, note="1F1B").workload.virtual_pipeline in {None, 1}
    assert guess(**stages, note="Interleaved 1F1B").workload.virtual_pipeline == 2
    primus = {"framework": "Primus", "pp": 8, "cp": 1, "vpp": 2, "global_batch": 32, "sequence": 4096}
    assert guess(**primus, note="1f1b-interleaved").workload.virtual_pipeline == 2


def test_options_of_megatron_lm_say_gpus_batch_vocabulary_and_what_is_kept():
    def asked(**options):
        return workload_of_options({**OPTIONS, **{name.replace("_", "-"): value for name, value in options.items()}}, None)

    assert asked().world_size == 8
    assert asked(world_size=16, global_batch_size=64).world_size == 16
    assert asked(num_experts=64, expert_model_parallel_size=64, global_batch_size=256).world_size == 64
    assert asked(rampup_batch_size="[384, 128, 1000]", global_batch_size=2048).global_batch_sequences == 384
    assert asked(tokenizer_type="NullTokenizer", vocab_size=131071).vocabulary == 131072
    assert asked(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="meta-llama/Llama-3.1-8B").shape.vocabulary == 128256
    narrow = asked(grad_reduce_in_bf16=True, bf16=True, use_precision_aware_optimizer=True, exp_avg_dtype="bf16")
    assert (narrow.gradient_bytes, narrow.optimizer_states) == (2, "fp32 with moments in bf16")
    with pytest.raises(ValueError, match="hybrid"):
        asked(hybrid_override_pattern="M*M-")
