"""`tprimat plan` as a user runs it: in a process of its own, on a machine without a GPU."""

import json
import math
import re
import shlex

import pytest
from commands import ROOT, run_command, run_script
from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.engines.base import engine_named
from tprimat.plan.build import build_plan
from tprimat.predict.published import score_published
from tprimat.runner import plan_choices

DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "data_parallel")
QUESTION = ("--architecture", "llama-3.1-70b", "--accelerator", "NVIDIA H100 80GB HBM3", "--gpus", "64")


def test_the_answer_is_one_screen(tmp_path):
    picture = tmp_path / "plan.png"
    done = run_command("plan", *QUESTION, "--picture", picture)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("llama-3.1-70b on 64 GPUs in 8 nodes (H100 SXM): 128 x 8,192 tokens a step, bf16")
    assert len(lines) < 45
    assert "published figures of H100 SXM" in done.stdout
    assert any(line.startswith("fastest   ") for line in lines)
    assert "missing, most of it" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_layouts_that_the_prediction_cannot_rank_are_counted_with_the_command_that_measures_them(tmp_path):
    words = ("plan", "--architecture", "llama-3.1-8b", "--accelerator", "H100 SXM", "--gpus", "8")
    found = json.loads(run_command(*words, "--json").stdout)
    best, error = found["fitting"][0]["tokens_per_second_per_gpu"], found["rates"]["relative_error"]
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
    fastest = {}
    for row in found["fitting"]:
        fastest.setdefault(tuple(row[name] for name in degrees), row["tokens_per_second_per_gpu"])
    close = sum(rate * (1 + error) > best for rate in fastest.values())
    shown = run_command(*words).stdout
    said, command = re.findall(
        r"^(.*) layouts are within the prediction's error of the fastest: .*:\n  (.*)$", shown, re.MULTILINE
    )[0]
    assert said == f"{close} of {len(fastest)}"
    dry = run_command(*command.replace("./", "").split(), "--platform", "nvidia", "--dry-run", "--output-dir", tmp_path)
    assert "no GPU here to predict for" in dry.stderr  # and no flag is refused
    assert command.endswith("--global-batch-size 128 --sequence-length 8192 --precision bf16")
    other = run_command("plan", "--architecture", "olmoe-1b-7b", *words[3:]).stdout
    assert "How far these rates may be off is not known: measure to rank the layouts:\n  ./benchmark.py --model olmoe" in other


def test_the_document_has_every_layout():
    done = run_command("plan", *QUESTION, "--json")
    found = json.loads(done.stdout)
    best, other = found["fitting"][0], found["too_large"][0]
    degrees = [best[name] for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")]
    assert degrees[0] * degrees[1] * degrees[2] * degrees[3] == 64
    assert (best["low"], best["high"]) == (None, None), "no step was measured on several nodes"
    one_node = run_command("plan", "--architecture", "llama-3.1-8b", "--accelerator", "H100 SXM", "--gpus", "8", "--json")
    fastest = json.loads(one_node.stdout)["fitting"][0]
    assert fastest["low"] < fastest["tokens_per_second_per_gpu"] < fastest["high"]
    assert sum(best["memory"].values()) == best["allocated_bytes"] < best["reserved_bytes"] < best["device_bytes"]
    assert sum(best["time"].values()) == pytest.approx(best["step_seconds"])
    assert best["missing_bytes"] == 0 < other["missing_bytes"]
    assert "step_seconds" not in other


def test_a_configured_model_has_its_batch_and_sequence_length():
    words = ("--model", "qwen", "--accelerator", "H200 SXM", "--gpus", "8")
    assert run_command("plan", *words).stdout.startswith("qwen-2.5-7b on 8 GPUs (H200 SXM): 128 x 2,048 tokens a step")
    assert "64 x 2,048 tokens a step" in run_command("plan", *words, "--global-batch-size", "64").stdout
    several = run_command("plan", *words[:4], "--gpus", "16,8").stdout
    assert "strong scaling, 128 sequences" in several
    assert several.index("\n   8 ") < several.index("\n  16 ")
    unknown = run_command("plan", "--model", "qwn", *words[2:])
    assert unknown.returncode == 2
    assert "no model 'qwn'" in unknown.stderr
    assert "llama, qwen" in unknown.stderr
    assert "--architecture deepseek-v3, or --model" in run_command("plan", "--model", "deepseek-v3", *words[2:]).stderr


def test_where_nothing_fits_the_fewest_gpus_that_would_are_named_with_a_layout():
    asked = ("--architecture", "llama-3.1-70b", "--accelerator", "H100 SXM", "--global-batch-size", "128", "--gpus")
    nothing = run_command("plan", *asked, "8")
    assert nothing.returncode == 1
    ((count, layout),) = re.findall(r"(\d+) GPUs are enough, the fewest of the powers of two: (TP\d PP\d DP\d), ", nothing.stdout)
    degrees = [int(number) for number in re.findall(r"\d+", layout)]
    assert int(count) == degrees[0] * degrees[1] * degrees[2]
    assert run_command("plan", *asked, count).returncode == 0
    assert run_command("plan", *asked, str(int(count) // 2)).returncode == 1
    several = run_command("plan", *asked, "4,8")
    assert (several.returncode, several.stdout.count("nothing fits")) == (1, 2)
    assert f"{count} GPUs are enough, the fewest of the powers of two: {layout}, " in several.stdout
    some = run_command("plan", *asked, f"8,{count}")
    assert (some.returncode, "are enough" in some.stdout) == (0, False)


@pytest.mark.parametrize(("engine", "accelerator"), [("nemo", "H100 SXM"), ("primus", "MI300X"), ("torchtitan", "H100 SXM")])
def test_the_benchmark_plans_for_a_cluster_with_an_engine_that_is_not_installed_here(engine, accelerator):
    words = ("--plan", accelerator, "--model", "llama", "--gpus", "8", "--engine", engine, "--precision", "fp8")
    done = run_script("benchmark.py", *words)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"\./benchmark\.py --model llama --engine {engine} .*--precision fp8", done.stdout)
    here = run_script("benchmark.py", *words[2:], "--platform", "amd" if engine == "primus" else "nvidia")
    assert here.returncode == 2, "a run needs it"


def test_several_processes_answer_as_one_does(monkeypatch):
    """The JSON has one variant of each layout."""
    models = "llama-3.2-1b,llama-3.1-8b,qwen-2.5-7b,olmoe-1b-7b"
    words = ("plan", "--accelerator", "H100 SXM,MI300X", "--gpus", "8", "--architecture", models, "--json")
    answers = []
    for cores in (1, 2):
        monkeypatch.setattr(plan_choices, "cpu_cores", lambda cores=cores: cores)
        answers.append(run_command(*words).stdout)
    assert answers[0] == answers[1]
    for choice in json.loads(answers[0])["choices"]:
        layouts = [tuple(row[name] for name in DEGREES) for row in choice["fitting"]]
        assert len(layouts) == len(set(layouts)) > 0


def test_accelerators_are_compared_by_what_a_billion_tokens_takes():
    words = ("--architecture", "llama-3-70b", "--accelerator", "H100 SXM,H200 SXM", "--gpus", "16,8")
    done = run_command("plan", *words)
    assert done.returncode == 0, done.stderr
    for row in (
        r"H100 SXM +8 +nothing fits; 32 GPUs do",
        r"H200 SXM +8 +nothing fits; 16 GPUs do",
        r"H200 SXM +16 +TP\d.* [\d.]+ GiB",
    ):
        assert re.search(f"^{row}", done.stdout, re.MULTILINE)
    assert "* No such step was measured" in done.stdout
    rows = json.loads(run_command("plan", *words, "--json").stdout)["choices"]
    assert [(row["accelerator"], row["gpus"], row["enough_gpus"]) for row in rows] == [
        ("H100 SXM", 8, 32),
        ("H100 SXM", 16, 32),
        ("H200 SXM", 8, 16),
        ("H200 SXM", 16, None),
    ]
    best = rows[-1]["fitting"][0]["tokens_per_second_per_gpu"]
    assert rows[-1]["gpu_hours_per_billion_tokens"] == pytest.approx(1e9 / best / 3600)
    assert run_command("plan", *words[:4], "--gpus", "8").returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--architecture", "llama-3.1-70b,lama", "--accelerator", "all"), "There is no model 'lama'."),
        (("--architecture", "llama-3.1-70b", "--accelerator", "H200 SXM,H100"), "There is no accelerator 'H100'."),
        (("--architecture", "llama-3.1-70b", "--accelerator", "H100"), "H100 SXM, H100 PCIe, H100 NVL"),
        (("--architecture", "llama-4"), "There is no model 'llama-4'."),
        ((*QUESTION, "--nodes", "7"), "64 GPUs are not the same number on each of 7 nodes."),
        ((*QUESTION, "--gpus", "63", "--nodes", "9", "--global-batch-size", "5"), "There is no legal layout."),
        ((*QUESTION, "--sequence-length", "999999"), "out of range"),
        (("--architecture", "llama-3.1-8b", "--accelerator", "A100 SXM 80GB", "--precision", "fp8"), "does not multiply fp8"),
        (("--architecture", "llama-3.1-8b", "--accelerator", "A100 SXM 80GB", "--precision", "fp8"), "try   bf16\n"),
        (("--architecture", "llama-3.1-8b", "--accelerator", "V100 SXM2 16GB"), "try   another accelerator\n"),
        ((*QUESTION[:4], "--gpus", "4", "--nodes", "8"), "try   --gpus 8\n"),
        (("--architecture", "llama-3.1-8b"), "this machine is not known"),
    ],
)
def test_a_mistake_is_explained(words, said):
    done = run_command("plan", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("accelerator", "precision", "tokens"),
    [("H100 SXM", "fp8", "131072"), ("RTX 4090", "bf16", "8192"), ("MI300X", "bf16", "4096")],
)
def test_the_flags_of_the_fastest_layout_run_what_was_predicted(tmp_path, accelerator, precision, tokens):
    """With other recomputation, dtype or engine they would run something else, which may not fit."""
    words = ("--model", "llama", "--accelerator", accelerator, "--precision", precision, "--sequence-length", tokens)
    planned = run_command("plan", *words, "--gpus", "8").stdout
    (memory,) = re.findall(r"([\d.]+ GiB) of [\d.]+ GiB a GPU", planned)
    flags, *_ = re.findall(r"^ {10}\./benchmark\.py --model llama (--.*)$", planned, re.MULTILINE)
    platform = "amd" if accelerator.startswith("MI") else "nvidia"
    where = ("--model", "llama", "--platform", platform, "--dry-run", "--output-dir", tmp_path)
    dry = run_command("benchmark.py", *where, *flags.split())
    assert dry.returncode == 0, dry.stderr
    assert f"{memory} predicted on the fullest rank" in dry.stdout
    (recompute,) = re.findall(r"^fastest .*?micro-batch \d+(?:, recompute (.*))?$", planned, re.MULTILINE)
    assert f", {precision}, recompute {recompute or 'none'}, " in dry.stdout
    assert "engine megatron" in dry.stdout


@pytest.mark.parametrize("by", ["flags", "file"])
def test_the_command_of_the_fastest_layout_keeps_what_the_user_set(tmp_path, by):
    """Without sharded weights, the layout would need more than the GPU has; with the file's recomputation, it would be slower."""
    asked = {"engine_options.fully_shard": "true", "recompute": "full"}
    settings = [f"platform_optimizations.nvidia.{key}={value}" for key, value in asked.items()]
    if by == "file":
        text = (ROOT / "config.yaml").read_text().replace("    recompute: none ", "    recompute: full ", 1)
        (tmp_path / "config.yaml").write_text(text)
        settings = settings[:1]
    words = ["--model", "llama", "--gpus", "8", *(word for text in settings for word in ("--set", text))]
    words += ["--config", tmp_path / "config.yaml"] if by == "file" else []
    planned = run_command("benchmark.py", "--plan", "H200 SXM", *words)
    assert planned.returncode == 0, planned.stderr
    (memory,) = re.findall(r"([\d.]+ GiB) of [\d.]+ GiB a GPU", planned.stdout)
    (command,) = re.findall(r"^ {10}\./benchmark\.py (.*)$", planned.stdout, re.MULTILINE)
    assert "recompute" not in planned.stdout.split("layout ")[0].split("./benchmark.py")[0], "no layout of it needs any"
    dry = run_command(
        "benchmark.py", *shlex.split(command), "--platform", "nvidia", "--gpus", "8", "--dry-run", "--output-dir", tmp_path
    )
    assert dry.returncode == 0, dry.stderr
    assert f"{memory} predicted on the fullest rank" in dry.stdout
    assert ", recompute none, " in dry.stdout


@pytest.mark.parametrize(
    ("accelerator", "reported"), [("L40S", 44.34), ("RTX 4090", 23.64), ("A100 SXM 40GB", 39.38), ("H200 SXM", 139.8)]
)
def test_what_fits_fits_the_memory_that_torch_reports(accelerator, reported):
    """ECC takes a sixteenth of GDDR6: a layout for the 48 GB of an L40S runs out of memory."""
    done = run_command("plan", "--model", "llama", "--accelerator", accelerator, "--gpus", "8", "--json")
    found = json.loads(done.stdout)
    assert found["fitting"]
    assert found["question"]["memory_bytes"] <= reported * 2**30
    assert max(row["device_bytes"] for row in found["fitting"]) <= reported * 2**30


def test_a_mixture_without_evidence_has_no_interval(tmp_path):
    words = ("--architecture", "qwen3-30b-a3b", "--accelerator", "H200 SXM", "--engine", "torchtitan")
    picture = tmp_path / "plan.png"
    shown = run_command("plan", *words, "--gpus", "8", "--picture", picture).stdout
    assert "such steps (mixtures of experts, bf16, FSDP2) took longer; no interval is given" in shown
    assert picture.is_file()
    scaling = run_command("plan", *words, "--gpus", "4,8").stdout
    assert not re.search(r"\[[\d,]+, [\d,]+\]", shown + scaling)
    document = json.loads(run_command("plan", *words, "--gpus", "8", "--json").stdout)
    assert document["rates"]["relative_error"] is None
    assert {(row["low"], row["high"]) for row in document["fitting"]} == {(None, None)}


INTERVAL = re.compile(r"\[[\d,]+, [\d,]+\]")


def test_the_interval_is_for_the_accelerators_whose_steps_gave_it():
    words = ("--architecture", "llama-3.1-8b", "--gpus", "8", "--accelerator")
    measured, published, neither = (run_command("plan", *words, name).stdout for name in ("H200 SXM", "MI325X", "MI300X"))
    assert INTERVAL.search(measured)
    assert not INTERVAL.search(published + neither)
    assert "We measured no step on MI300X, so no interval is given (docs/planning.md)." in neither
    count, percent = re.search(r"; (\d+) published results of dense models on it were within (\d+) % ", published).groups()
    errors = [abs(score.error) for score in score_published() if "mi325x" in score.name]
    assert (int(count), int(percent)) == (len(errors), math.ceil(100 * max(errors)))


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
        ("torchtitan", "qwen3-30b-a3b", "bf16", 2048),  # which has no pipeline, and full recomputation only
    ],
)
def test_every_layout_that_is_listed_is_one_that_the_engine_runs(engine, model, precision, tokens):
    words = ("--engine", engine, "--architecture", model, "--precision", precision, "--sequence-length", str(tokens), "--json")
    document = json.loads(run_command("plan", *words, "--accelerator", "H200 SXM", "--gpus", "8").stdout)
    rows = document["fitting"] + document["too_large"]
    assert len(rows) > 10
    for recompute in {row["recompute"] for row in rows}:
        same = [row for row in rows if row["recompute"] == recompute]
        for plan in plans_of(same, document["question"], engine=engine, model=model, precision=precision, recompute=recompute):
            refused = engine_named(engine).refusal(plan, lambda *keys: ".".join(keys))
            assert refused is None, (plan.workload, str(refused))


def test_what_fits_with_less_is_said_in_every_form_with_the_command_that_plans_it():
    words = ("--architecture", "llama-3.1-70b", "--accelerator", "H100 SXM")
    alone = run_command("plan", *words, "--gpus", "16").stdout
    (command,) = (line.strip() for line in alone.splitlines() if line.strip().startswith("./benchmark.py"))
    planned = run_command("benchmark.py", *shlex.split(command)[1:])
    assert planned.returncode == 0, planned.stderr
    (layout,) = re.findall(r"It fits with engine_options.gradients: bf16 .*: (TP.*), micro-batch", alone)
    assert f"fastest   {layout}, micro-batch" in planned.stdout
    assert planned.stdout.startswith("llama-3.1-70b on 16 GPUs in 2 nodes (H100 SXM): 128 x 8,192 tokens a step")
    several = run_command("plan", *words, "--gpus", "16,24,32").stdout
    assert "With engine_options.gradients: bf16 (which rounds sums of gradients) it fits 16 and 24 GPUs." in several
    rows = run_command("plan", *words[:2], "--accelerator", "H100 SXM,MI300X", "--gpus", "16,24").stdout
    assert "nothing fits; 32 GPUs do, or bf16 gradients" in rows
    assert re.search(r"H100 SXM +24 +TP\d.* §", rows)
    assert "§ By Megatron-Core with Transformer Engine, which TPrimat does not start" in " ".join(rows.split())


@pytest.mark.parametrize(("flag", "value"), [("--tp", "8"), ("--micro-batch-size", "1"), ("--set cp", "cp=2")])
def test_a_plan_refuses_a_choice_that_is_its_own(flag, value):
    done = run_command("benchmark.py", "--plan", "H100 SXM", "--gpus", "8", "--model", "llama", flag.split()[0], value)
    assert (done.returncode, f"--plan chooses {flag} itself." in done.stderr) == (2, True)
    assert f"leave out {flag}" in done.stderr
