"""`tprimat plan` as a user runs it: in a process of its own, on a machine without a GPU."""

import json
import math
import re

import pytest
from commands import run_command
from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.engines.base import engine_named
from tprimat.plan.build import build_plan
from tprimat.predict.calibration import figures

QUESTION = ("--model", "llama-3.1-70b", "--gpu", "NVIDIA H100 80GB HBM3", "--gpus", "64")


def fastest(text):
    """The cells of the first layout in a table, and the command that runs it."""
    lines = text.splitlines()
    row = lines[next(number for number, line in enumerate(lines) if line.startswith("-----")) + 1]
    return re.split(r"\s{2,}", row), re.search(r"^run the fastest: +\./benchmark\.py (.*)$", text, re.MULTILINE)[1]


def test_the_answer_is_three_layouts_and_the_next_command_and_the_whole_one_has_all():
    done = run_command("plan", *QUESTION)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("llama-3.1-70b on 64 GPUs in 8 nodes (H100 SXM, 79.2 GiB each): 128 x 8,192 tokens a step, bf16")
    assert len(lines) < 20
    assert "published figures of H100 SXM" in done.stdout
    (more,) = re.findall(r"^(\d+) more layouts: --all$", done.stdout, re.MULTILINE)
    whole = run_command("plan", *QUESTION, "--all").stdout
    rows = [line for line in whole.splitlines() if re.match(r"(TP\d|PP\d|CP\d|DP\d)", line)]
    assert len(rows) == int(more) + 3
    assert "missing, most of it" in whole
    assert re.search(r"^memory +\w+ [\d.]+ GiB, ", whole, re.MULTILINE)


@pytest.mark.parametrize(
    ("engine", "model", "precision", "why"),
    [
        ("bridge", "llama-3.1-8b", "mxfp4", "No engine here trains in mxfp4"),
        ("nemo", "gpt-3-175b", "bf16", "The model gpt-3-175b names no NeMo recipe"),
        ("megatron-lm", "deepseek-v3", "bf16", "The engine megatron-lm cannot describe deepseek-v3"),
    ],
)
def test_no_command_is_printed_that_would_be_refused(engine, model, precision, why):
    words = ("--engine", engine, "--model", model, "--precision", precision, "--gpu", "B200", "--gpus", "128")
    assert f"\nTPrimat cannot start this run. {why}" in run_command("plan", *words).stdout


@pytest.mark.parametrize(
    ("accelerator", "gpus", "assumed"),
    [
        ("H100 SXM", 8, None),
        ("B200", 16, r"None was measured on B200 or on several nodes: -\d\d % to \+\d\d % is assumed"),
        ("B200", 8, "None was measured on B200: the same range is assumed"),
        ("RTX 4090", 8, r"None was measured on RTX 4090: -\d\d % to \+\d\d % is assumed"),
        ("MI300X", 8, r"This run differs from them: -\d\d % to \+\d\d % is assumed"),
    ],
)
def test_the_proof_says_where_it_was_measured_and_what_is_assumed(accelerator, gpus, assumed):
    words = ("plan", "--model", "llama-3.1-8b", "--gpu", accelerator, "--gpus", str(gpus))
    (proof,) = re.findall("^Predicted from.*$", run_command(*words).stdout, re.MULTILINE)
    best = json.loads(run_command(*words, "--json").stdout)["fitting"][0]
    width, rows = figures()["published"]["errors"][best["kind"]]
    assert sum(best["measured_on"].values()) == rows
    assert all(f"{count} on {name}" in proof for name, count in best["measured_on"].items())
    assert f"within {math.expm1(-width):+.0%} to {math.expm1(width):+.0%} of the prediction." in proof.replace(" %", "%")
    assert best["assumed"] == ("is assumed" in proof) == (assumed is not None)
    assert re.search(assumed or r"of the prediction\.$", proof)


def test_the_document_has_every_layout():
    done = run_command("plan", *QUESTION, "--json")
    answer = json.loads(done.stdout)
    best, other = answer["fitting"][0], answer["too_large"][0]
    degrees = [best[name] for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")]
    assert degrees[0] * degrees[1] * degrees[2] * degrees[3] == 64
    assert best["low"] < best["tokens_per_second_per_gpu"] < best["high"]
    sizes = [best[f"{name}_bytes"] for name in ("allocated", "reserved", "expected_device", "device")]
    assert [sum(best["memory"].values()), *sizes[1:]] == sorted(set(sizes))
    assert sum(best["time"].values()) == pytest.approx(best["step_seconds"])
    assert best["missing_bytes"] == 0 < other["missing_bytes"]
    assert "step_seconds" not in other


def test_small_micro_batches_over_tensor_ranks_wait_for_the_host_unless_graphs_launch_them():
    words = ("plan", "--model", "llama-3.1-8b", "--gpu", "H100 SXM", "--global-batch-size", "64", "--sequence-length", "2048")
    rows = json.loads(run_command(*words, "--gpus", "4", "--json").stdout)["fitting"]
    whole, halves = (
        next(row for row in rows if (row["tensor_parallel"], row["pipeline_parallel"], row["micro_batch_sequences"]) == place)
        for place in ((4, 1, 1), (2, 2, 1))
    )
    assert "host" not in whole["time"]
    assert halves["time"]["host"] > 0.4 * halves["step_seconds"]
    assert halves["tokens_per_second_per_gpu"] > 1.4 * halves["low"]
    shown = run_command(*words, "--gpus", "64").stdout
    assert re.search(r"With the slowest host that we measured, it takes \d\d % longer\.", shown)


def test_a_configured_model_has_its_batch_and_sequence_length():
    words = ("--model", "qwen", "--gpu", "H200 SXM", "--gpus", "8")
    assert run_command("plan", *words).stdout.startswith(
        "qwen-2.5-7b on 8 GPUs (H200 SXM, 139.6 GiB each): 128 x 2,048 tokens a step"
    )
    assert "64 x 2,048 tokens a step" in run_command("plan", *words, "--global-batch-size", "64").stdout


def test_where_nothing_fits_the_fewest_gpus_that_would_are_named_with_a_layout():
    asked = ("--model", "llama-3.1-70b", "--gpu", "H100 SXM", "--global-batch-size", "128", "--gpus")
    nothing = run_command("plan", *asked, "8")
    assert nothing.returncode == 1
    ((count, layout),) = re.findall(r"(\d+) GPUs are enough: ([A-Z0-9 ]+), ", nothing.stdout)
    assert int(count) == math.prod(int(number) for number in re.findall(r"\d+", layout))
    assert run_command("plan", *asked, count).returncode == 0
    assert run_command("plan", *asked, str(int(count) // 2)).returncode == 1


def test_both_routings_are_in_the_answer_and_the_forced_one_is_faster():
    asked = ("--model", "qwen3-30b-a3b", "--gpu", "H100 SXM", "--gpus", "8")
    natural = json.loads(run_command("plan", *asked, "--json").stdout)["fitting"][0]
    assert natural["other_routing"]["routing"] == "balanced"
    assert natural["other_routing"]["tokens_per_second_per_gpu"] > natural["tokens_per_second_per_gpu"]
    forced = run_command("plan", *asked[:-1], "32", "--routing", "forced,capacity=1.25").stdout
    assert "Under natural routing: " in forced
    assert "alltoall, experts drop tokens beyond 1.25 x the mean" in forced
    assert forced.count("--set routing=balanced --set training.moe_expert_capacity_factor=1.25") == 2


def test_a_dispatcher_by_name_changes_the_exchange_between_nodes_and_is_refused_where_the_engine_has_another():
    asked = ("plan", "--model", "deepseek-v3", "--gpu", "H100 SXM", "--gpus", "256", "--routing")
    answers = [json.loads(run_command(*asked, name, "--json").stdout) for name in ("alltoall", "hybridep")]
    alltoall, hybridep = (one["fitting"][0]["tokens_per_second_per_gpu"] for one in answers)
    assert alltoall < hybridep
    refused = run_command(*asked, "deepep", "--engine", "megatron")
    assert refused.returncode == 2
    assert "sends tokens to experts by alltoall" in refused.stderr
    assert "'even' is not one of natural, forced, alltoall" in run_command(*asked, "even").stderr


def test_money_and_time_choose_among_numbers_of_gpus():
    asked = ("--model", "llama-3.1-8b", "--gpu", "H100 SXM", "--gpus", "4,8", "--price", "2.5", "--tokens", "10B")
    document = json.loads(run_command("plan", *asked, "--deadline", "2", "--json").stdout)
    small, large = (one["fitting"][0] for one in document["gpu_counts"])
    assert document["question"]["gpus"] == 8
    assert small["days"] > 2 > large["days"] == pytest.approx(10e9 / large["tokens_per_second_per_gpu"] / 8 / 86400)
    assert large["dollars_per_billion_tokens"] == pytest.approx(2.5 * 1e9 / 3600 / large["tokens_per_second_per_gpu"])
    assert 0.3 < large["mfu"] < 0.7
    shown = run_command("plan", *asked, "--deadline", "1").stdout
    assert re.search(r"^4  .*\n8 .*\n\nNo number of GPUs above.* the fastest\.\n", shown, re.MULTILINE)
    paid = run_command("plan", "--model", "llama-3.1-70b", *asked[2:5], "16,64,256", *asked[6:], "--budget", "1").stdout
    assert re.search(r"\n16 +TP8 FSDP2, Megatron-FSDP (?s:.*)this is the cheapest\.\n\nllama-3.1-70b on 64 GPUs", paid)


@pytest.mark.parametrize(
    ("accelerator", "precision", "tokens"),
    [("H100 SXM", "fp8", "131072"), ("RTX 4090", "bf16", "8192"), ("MI300X", "bf16", "4096"), ("B200", "mxfp8", "8192")],
)
def test_the_flags_of_the_fastest_layout_run_what_was_predicted(tmp_path, accelerator, precision, tokens):
    words = ("--model", "llama", "--gpu", accelerator, "--precision", precision, "--sequence-length", tokens)
    planned = run_command("plan", *words, "--gpus", "8").stdout
    cells, flags = fastest(planned)
    platform = "amd" if accelerator.startswith("MI") else "nvidia"
    dry = run_command("benchmark.py", "--platform", platform, "--dry-run", "--output-dir", tmp_path, *flags.split())
    assert dry.returncode == 0, dry.stderr
    assert f"{cells[-2]} predicted on the fullest rank, at most {cells[-1]}" in dry.stdout
    assert "engine megatron" in dry.stdout


def plans_of(rows, asked, *, engine, model, precision, recompute):
    """The plans that ./benchmark.py makes of the layouts that `tprimat plan` lists: each is a strategy of one configuration."""
    names = {
        "tensor_parallel": "tensor_model_parallel_size",
        "pipeline_parallel": "pipeline_model_parallel_size",
        "virtual_pipeline": "virtual_pipeline_model_parallel_size",
        "context_parallel": "context_parallel_size",
        "expert_parallel": "expert_model_parallel_size",
        "micro_batch_sequences": "micro_batch_size",
    }
    layouts = [{key: row[name] for name, key in names.items() if row[name] is not None} for row in rows]
    given = {
        "models.asked": {"name": "asked", "architecture": model},
        "parallelism": {str(number): {"asked": {"nvidia": layout}} for number, layout in enumerate(layouts)},
        "training.data.global_batch_size": asked["global_batch_sequences"],
        "training.data.sequence_length": asked["sequence_tokens"],
        "hardware.platforms.nvidia.gpus_per_node": asked["gpus"],
        "platform_optimizations.nvidia.precision": precision,
        "platform_optimizations.nvidia.recompute": recompute,
    }
    settings = [Setting(tuple(key.split(".")), value, key) for key, value in given.items()]
    loaded = read_config(size="full", settings=settings, environment={})
    for number in range(len(rows)):
        yield build_plan(loaded, request_of("asked", str(number), engine=engine, gpus_found=None))


@pytest.mark.parametrize(
    ("engine", "model", "precision", "tokens"),
    [
        ("megatron", "llama-3.1-8b", "fp8", 1000),  # whose micro-batches of 1 sequence are no multiple of 16 tokens
        ("megatron", "mixtral-8x7b", "bf16", 1000),
        ("megatron-lm", "qwen3-30b-a3b", "fp8", 2048),
        ("torchtitan", "llama-3.1-8b", "bf16", 2048),  # which has no pipeline, and full recomputation only
    ],
)
def test_every_layout_that_is_listed_is_one_that_the_engine_runs(engine, model, precision, tokens):
    words = ("--engine", engine, "--model", model, "--precision", precision, "--sequence-length", str(tokens), "--json")
    document = json.loads(run_command("plan", *words, "--gpu", "H200 SXM", "--gpus", "8").stdout)
    rows = document["fitting"] + document["too_large"]
    assert len(rows) > 10
    for recompute in {row["recompute"] for row in rows}:
        same = [row for row in rows if row["recompute"] == recompute]
        for plan in plans_of(same, document["question"], engine=engine, model=model, precision=precision, recompute=recompute):
            refused = engine_named(engine).refusal(plan, lambda *keys: ".".join(keys))
            assert refused is None, (plan.workload, str(refused))
