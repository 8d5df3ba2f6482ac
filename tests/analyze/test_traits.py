"""A trap for each trait: two runs that differ in it alone are never repetitions, and a comparison says so as the table says."""

from pathlib import Path

import pytest
from changes import evidence as evidence_of
from changes import ran_with, replace

from tprimat.analyze.compare import Question, verdict
from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.traits import TRAITS, model_name
from tprimat.core.models import model_shape
from tprimat.records.discover import read_result
from tprimat.records.schema import NodeRecord
from tprimat.records.upgrade import upgraded_run
from tprimat.report.words import sentence

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "tests" / "runs" / "h100" / "runs" / "h100-llama-0"
PAGE = (ROOT / "docs" / "comparing.md").read_text(encoding="utf8")
WORDS = {"refuse": "refused", "warn": "flagged", "list": "listed"}

OPTIONS = {"optimizer_states": "fp32"}
EVIDENCE = evidence_of(
    source="running_framework",
    attention="flash",
    optimizer="DistributedOptimizer over AdamW",
    matmul_dtype="bf16",
    parameter_dtype="bfloat16",
    gradient_dtype="float32",
    sequence_parallel=False,
    data="mock (seed 1234)",
)


def seen(**fields):
    return lambda run: replace(run, evidence=replace(run.evidence, **fields))


def ran(**fields):
    return lambda run: ran_with(run, **fields)


def on(**fields):
    return lambda run: replace(run, machine=replace(run.machine, **fields))


def hosted(**fields):
    return lambda run: replace(run, nodes=tuple(replace(node, **fields) for node in run.nodes))


TRAPS = {
    "model": ran(model="qwen"),
    "accelerator": on(accelerator="AMD Instinct MI300X", platform="rocm"),
    "gpus": on(gpus_per_node=4),
    "nodes": on(gpus_per_node=4, nodes=2),
    "strategy": ran(strategy="balanced"),
    "layout": ran(tensor_parallel=2, data_parallel=4),
    "engine": ran(engine="nemo"),
    "dtype": ran(matmul_dtype="fp8"),
    "evidence": seen(grades={"matmul_dtype": "resolved"}),
    "fp8-scaling": seen(fp8_scaling="current"),
    "routing": ran(
        shape=replace(model_shape("llama-3.1-8b"), experts=8, experts_per_token=2, expert_ffn=14336), routing="balanced"
    ),
    "expert-capacity": ran(
        shape=replace(model_shape("llama-3.1-8b"), experts=8, experts_per_token=2, expert_ffn=14336), expert_capacity=1.25
    ),
    "global-batch": ran(global_batch_sequences=64),
    "micro-batch": ran(micro_batch_sequences=2),
    "tokens": seen(tokens_per_step=131072),
    "sequence": ran(sequence_tokens=4096),
    "recompute": ran(recompute="full"),
    "clock": ran(clock="framework"),
    "options": ran(engine_options={"fused_adam": True}),
    "shape": ran(shape=replace(model_shape("llama-3.1-8b"), ffn=8192)),
    "optimizer-states": ran(optimizer_states="bf16"),
    "attention": seen(attention="cudnn"),
    "optimizer": seen(optimizer="AdamW"),
    "weights": seen(parameter_dtype="float32"),
    "gradients": seen(gradient_dtype="bfloat16"),
    "sequence-parallel": seen(sequence_parallel=True),
    "data": seen(data="text in tokens.bin"),
    "power-limit": on(power_limit_watts=500.0),
    "driver": on(driver="570.1"),
    "processor": hosted(processor="AMD EPYC 9654", cores=32),
    "environment": ran(environment={"NCCL_P2P_DISABLE": "1"}),
    "software": ran(software={"torch": "2.10.0"}),
}
BEFORE = {"fp8-scaling": lambda run: seen(fp8_scaling="delayed")(ran_with(run, matmul_dtype="fp8"))}
"""What both runs need for a trait to differ alone."""
FORGOTTEN = {
    "dtype": ran(matmul_dtype=None),
    "tokens": lambda run: replace(run, global_batch_sequences=None, evidence=replace(run.evidence, tokens_per_step=None)),
    "sequence": ran(sequence_tokens=None),
    "gpus": on(gpus_per_node=None),
    "shape": ran(shape=None),
    "optimizer-states": ran(optimizer_states=None),
    "recompute": ran(recompute=None),
    "attention": seen(attention=None),
    "data": seen(data=None),
    "power-limit": on(power_limit_watts=None),
    "driver": on(driver=None),
    "processor": hosted(processor=None, cores=None),
    "environment": ran(environment=None),
    "software": ran(software={}),
}


@pytest.fixture
def known():
    """A run that records every trait."""
    result = read_result(LLAMA)
    machine = replace(result.run.machine, power_limit_watts=700.0, driver="580.1")
    evidence = replace(EVIDENCE, tokens_per_step=result.run.ran.global_batch_sequences * result.run.ran.sequence_tokens)
    run = replace(
        result.run,
        machine=machine,
        evidence=evidence,
        recompute="none",
        optimizer_states="fp32",
        software={"torch": "2.11.0"},
        environment={},
        nodes=(NodeRecord(host="a", accelerator=machine.accelerator, gpus=8, processor="Xeon 8480+", cores=64),),
        engine_options=OPTIONS,
    )
    return replace(result, run=run)


def groups_of(*results):
    measured = [measure(result, MetricOptions()) for result in results]
    return group_runs([replace(item, not_counted=()) for item in measured])


def judged(known, trap, **options):
    other = replace(known, run=trap(replace(known.run, run_id="other")))
    first, second = groups_of(known, other)
    return verdict(first, second, Question(**options))


def test_every_trait_has_a_trap():
    assert list(TRAPS) == list(TRAITS)


@pytest.mark.parametrize("key", TRAITS)
def test_runs_that_differ_in_one_trait_are_two_configurations_and_the_verdict_names_both_sides(key, known):
    both = replace(known, run=BEFORE[key](known.run)) if key in BEFORE else known
    judgment = judged(both, TRAPS[key])
    (trait,) = [one for one in judgment.traits if one.key == key]
    assert trait.effect == TRAITS[key].effect
    assert (judgment.outcome == "refused") == any(one.effect == "refuse" for one in judgment.traits)
    assert judged(both, TRAPS[key], even_if_different=True).ratio is not None
    words = sentence(judgment)
    if trait.effect == "refuse":
        assert f"{trait.name} " in words.partition("they differ: ")[2]
    else:
        before = "Caution, they also differ in " if trait.effect == "warn" else "They differ in "
        assert trait.name in words.partition(before)[2]


def test_a_list_is_told_by_the_parts_that_differ(known):
    one, tuned = {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "UCX_TLS": "rc"}
    words = [judged(known, ran(environment=other)).traits[0].words for other in (None, one, tuned)]
    assert words == [
        ("no environment", "environment unknown"),
        ("without NCCL_ALGO=Ring", "NCCL_ALGO=Ring"),
        ("without NCCL_ALGO=Ring, NCCL_PROTO=LL and 1 more", "NCCL_ALGO=Ring, NCCL_PROTO=LL and 1 more"),
    ]
    runs = [replace(known, run=ran(environment=variables)(known.run)) for variables in ({}, one, tuned)]
    assert [group.label for group in groups_of(*runs[:2])] == ["llama H100 SXM", "llama H100 SXM NCCL_ALGO=Ring"]
    assert [group.label.split()[3:5] for group in groups_of(runs[0], runs[2])] == [[], ["NCCL_ALGO=Ring", "and"]]


MIXTURE = model_shape("deepseek-v2-lite")


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        (MIXTURE, {"experts_per_token": 4}),
        (MIXTURE, {"kv_lora_rank": 256}),
        (model_shape("llama-3.1-8b"), {"gated": False}),
        (model_shape("llama-3.1-8b"), {"tied_embeddings": True}),
        (model_shape("llama-3.1-8b"), {"norm": "layernorm"}),
    ],
)
def test_whatever_changes_the_work_of_a_token_is_another_shape(shape, change, known):
    judgment = judged(replace(known, run=replace(known.run, shape=shape)), ran(shape=replace(shape, **change)))
    assert [one.key for one in judgment.differences if one.key == "shape"] == ["shape"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_layer_dtype": "fp8"}, "fp8 with output layer"),
        ({"attention_dtype": "fp8"}, "fp8 with attention"),
        ({"layers_in_bf16": 1}, "fp8 except in 1 layer"),
        (
            {"output_layer_dtype": "fp8", "attention_dtype": "fp8", "layers_in_bf16": 2},
            "fp8 with output layer and attention except in 2 layers",
        ),
    ],
)
def test_more_or_less_of_the_model_in_fp8_is_another_dtype(fields, words, known):
    usual = replace(known, run=ran_with(known.run, matmul_dtype="fp8"))
    judgment = judged(usual, seen(**fields))
    assert judgment.outcome == "refused"
    assert f"dtype {words} against fp8" in sentence(judgment)
    assert len(groups_of(known, replace(known, run=seen(**fields)(replace(known.run, run_id="other"))))) == 1, "bf16 is bf16"


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({"layers": "local"}, "current"),
        ({"layers": "transformer_engine", "fp8_scaling": "delayed"}, "delayed"),
        ({"fp8_recipe": "tensorwise"}, "current"),
        ({"layers": "transformer_engine"}, None),
    ],
)
def test_older_records_tell_their_scaling_by_their_options(options, scaling):
    older = {"matmul_dtype": "fp8", "engine_options": options}
    assert upgraded_run(older)["workload"].get("fp8_scaling") == scaling
    seen_otherwise = {"source": "running_framework", "fp8_scaling": "blockwise"}
    assert "fp8_scaling" not in upgraded_run({**older, "evidence": seen_otherwise})["workload"]
    assert "fp8_scaling" not in upgraded_run({**older, "matmul_dtype": "bf16"})["workload"]


def test_the_option_behind_an_output_layer_in_fp8_is_no_second_difference(known):
    off, on = ({**OPTIONS, "fp8_output_layer": value} for value in (False, True))
    usual = replace(known, run=ran_with(known.run, matmul_dtype="fp8", engine_options=off))
    judgment = judged(usual, lambda run: seen(output_layer_dtype="fp8")(replace(run, engine_options=on)))
    assert [one.key for one in judgment.traits] == ["dtype"]
    before_the_option = replace(usual, run=replace(usual.run, run_id="other", engine_options=OPTIONS))
    assert len(groups_of(usual, before_the_option)) == 1


@pytest.mark.parametrize("switch", ["cuda_graphs", "fully_shard"])
def test_a_record_from_before_a_switch_equals_one_with_the_switch_off(switch, known):
    off, on = (
        replace(known, run=replace(known.run, run_id="other", engine_options={**OPTIONS, switch: value}))
        for value in (False, True)
    )
    assert len(groups_of(known, off)) == 1
    assert len(groups_of(known, on)) == 2


def test_a_switch_that_a_log_says_is_off_is_recorded_and_one_that_it_does_not_name_is_not(known):
    said = {}
    for name, options in (("off", {"cuda_graphs": False}), ("on", {"cuda_graphs": True}), ("silent", {})):
        evidence = replace(known.run.evidence, source="log")
        said[name] = TRAITS["options"].value(replace(known.run, engine_options=options, evidence=evidence))
    assert said == {"off": "cuda_graphs=False", "on": "cuda_graphs=True", "silent": None}


@pytest.mark.parametrize("key", FORGOTTEN)
def test_what_one_side_does_not_record_is_not_equal(key, known):
    judgment = judged(known, FORGOTTEN[key])
    (trait,) = [one for one in judgment.traits if one.key == key]
    assert trait.effect == (TRAITS[key].unknown or TRAITS[key].effect)
    assert f"{trait.name} unknown" in sentence(judgment)


def test_what_neither_side_records_is_said_to_be_unknown(known):
    result = replace(known, run=replace(known.run, evidence=replace(known.run.evidence, attention=None, data=None)))
    judgment = judged(result, ran(strategy="balanced"))
    assert judgment.unrecorded == ("attention", "data", "whether clocks were held back")
    assert [one.key for one in judgment.traits] == ["strategy"]


def test_a_trait_that_is_the_question_may_differ_and_whatever_else_differs_is_then_warned_of(known):
    def fp8_by_nemo(run):
        return ran_with(run, matmul_dtype="fp8", engine="nemo", micro_batch_sequences=2)

    assert judged(known, fp8_by_nemo).outcome == "refused"
    judgment = judged(known, fp8_by_nemo, varying=("dtype",))
    assert judgment.outcome == "no difference shown"
    assert {one.key: one.effect for one in judgment.traits} == {"dtype": "list", "engine": "warn", "micro-batch": "warn"}
    assert "Varied dtype (bf16 | fp8)." in sentence(judgment)
    assert "Caution, they also differ in engine (megatron | nemo), micro-batch (1 | 2)." in sentence(judgment)


def test_the_page_of_comparisons_has_each_trait_and_no_other():
    for key, trait in TRAITS.items():
        unknown = "" if trait.unknown is None else f"; unknown: {WORDS[trait.unknown]}"
        assert f"\n| `{key}` | {trait.name} | {WORDS[trait.effect]}{unknown} | " in PAGE
    assert PAGE.count("\n| `") == len(TRAITS)


@pytest.mark.parametrize(
    ("key", "shape", "label"),
    [
        ("qwen3_moe", "olmoe-1b-7b", "olmoe-1b-7b"),
        ("qwen3_moe", "qwen3-30b-a3b", "qwen3_moe"),
        ("llama", "llama-3.2-3b", "llama"),
        ("ours", "olmoe-1b-7b", "ours"),
    ],
)
def test_a_model_of_another_family_than_its_key_has_its_own_name(key, shape, label):
    run = read_result(LLAMA).run
    assert model_name(replace(run, model=key, shape=model_shape(shape))) == label
