"""tprimat explain as a user starts it, on recorded runs."""

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import run_command

ROOT = Path(__file__).parents[2]
H200, H100 = ROOT / "benchmarks/records/h200", ROOT / "benchmarks/records/h100"
DP2 = H200 / "in-turn-four-programs/megatron/dp_mbs4/1"
RECOMPUTED = H100 / "in-turn-two-gpus/megatron/dp_mbs4_full/1"
EXPERTS = H100 / "in-turn-four-gpus/megatron/moe_ep4/1"
STEP = {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#5", "ts": 0, "dur": 2_700_000, "pid": 0, "tid": 7}
KERNELS = (("nvjet_tst_192x192", 0, 2_200_000), ("ncclDevKernel_ReduceScatter_Sum_f32", 2_150_000, 150_000))


def explain(*words):
    done = run_command("explain", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(*words):
    return json.loads(explain(*words, "--json"))


def parts(answer):
    return {loss["name"]: loss for loss in answer["losses"]}


@pytest.mark.parametrize(
    ("run", "probes", "known"),
    [
        (DP2, H200 / "probes-1gpu", {"clock": "run", "products": "machine", "host": "run", "rest": "rest"}),
        (DP2, None, {"clock": "run", "products": "predicted", "attention": "predicted"}),
        (RECOMPUTED, H100, {"recompute": "machine", "replicas": "machine"}),
        (EXPERTS, H100, {"uneven": "run", "experts": "machine"}),
        (ROOT / "tests/runs/mi300x", None, {"rest": "rest"}),
    ],
)
def test_the_parts_are_the_step_and_each_says_how_it_is_known(run, probes, known):
    answer = document(run, *(("--set", f"probes={probes}") if probes else ()))
    losses = parts(answer)
    assert abs(answer["at_peak_seconds"] + sum(loss["seconds"] for loss in losses.values()) - answer["step_seconds"]) < 1e-9
    if answer["peak_flops"]:
        assert abs(answer["peak_flops"] - sum(loss["flops"] for loss in losses.values()) - answer["flops"]) < 1e3
    assert {name: losses[name]["known_by"] for name in known} == known
    assert 0 < len(answer["advice"]) <= 3 or set(losses) == {"rest"}


def test_the_text_says_what_held_the_clock_and_what_helps():
    text = explain(DP2, "--set", f"probes={H200 / 'probes-1gpu'}", "--set", "peak=sparse")
    assert text.startswith("llama dp_mbs4, megatron, bf16 on 2 x H200 SXM: 587 of 989.4 TFLOP/s per GPU, 59.4 %; 2.60 s a step")
    assert "telemetry: 1,418 MHz of 1,830; power cap in 100 % of the readings" in text
    assert "TFLOP/s: the power limit holds it down; nvidia-smi" in text
    assert re.search(r"\d+ TFLOP/s and TP comm.*: run again", explain(H100 / "in-turn-two-gpus/transformer_engine/tp2_mbs2/3"))
    text = explain(RECOMPUTED, "--in", "ms")
    assert "recomputation, 7" in text
    assert "% tokens/s, predicted)" in text
    assert "ms: a CPU has no published matrix peak" in explain(ROOT / "tests/runs/cpu")


def test_a_slow_rank_is_named_and_takes_the_time_by_which_its_step_is_longer():
    """Another program used the second of two GPUs."""
    cases = ROOT / "benchmarks/records/explain-cases/third-machine"
    text = explain(cases / "uneven_ranks", "--against", cases / "dp2", "--in", "ms")
    assert "times of the ranks: rank 1 takes 1.46 s, the others 699 ms" in text
    (grown,) = re.findall(r"^uneven ranks or experts +\+([\d.]+)$", text, re.MULTILINE)
    assert float(grown) == pytest.approx(1443.1 - 656.7, rel=0.05)


def test_what_no_part_explains_is_to_be_profiled_and_a_late_host_to_be_done_without():
    """Products in fp8 over four tensor ranks waited for a slow host, and look as long to telemetry as what spins for them."""
    fp8 = H100 / "in-turn-four-gpus-slow-host/megatron/tp4_mbs4_fp8"
    text = explain(fp8, "--against", H100 / "in-turn-four-gpus/megatron/tp4_mbs4")
    waits = r"^not explained, 784 TFLOP/s: run again with --profile, .*; a GPU that waits for another counts as busy, .* 23 % of"
    assert re.search(waits + r" the step\nGPU idle.*cuda_graphs=true, .* \(\+30\.4 % tokens/s, predicted\)$", text, re.MULTILINE)
    assert re.search(r"^dtype +fp8 +bf16 +\+", text, re.MULTILINE)
    assert not re.search(r"^(layout|uneven)", text, re.MULTILINE)
    advice, *_ = document(H200 / "moe/balanced/transformer_engine/1")["advice"]
    assert (advice["words"][-12:], advice["gain"]) == ("layers=local", pytest.approx(345 / 211 - 1, abs=0.15))  # as its own ran
    tight = r"^GPU idle.*layers=local \(\+\d\d\.\d % tokens/s, predicted; memory too tight to promise\)"
    assert re.search(tight, explain(H100 / "in-turn-four-gpus/transformer_engine/moe_ep4/1"), re.MULTILINE)


def test_a_trace_takes_the_place_of_the_prediction(tmp_path):
    events = [STEP] + [
        {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": size, "pid": 0, "tid": at} for name, at, size in KERNELS
    ]
    shutil.copytree(DP2, tmp_path / "output")
    (run,) = (tmp_path / "output/runs").iterdir()
    trace = tmp_path / "output" / f"profile_cuda_llama_{run.name}.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    answer = document(run)
    trace.unlink()
    assert document(run) == answer, "the record keeps what was read"
    losses = parts(answer)
    assert answer["trace"]["exposed_communication_seconds"] == pytest.approx(0.1)
    assert (losses["replicas"]["seconds"], losses["replicas"]["known_by"]) == (pytest.approx(0.1), "run")
    # The profiled step waited 0.4 s; a steady one takes 2.60 s, of which the kernels leave 0.30.
    assert losses["host"]["seconds"] == pytest.approx(answer["step_seconds"] - 2.3)
    assert abs(losses["rest"]["seconds"]) < 1e-9
    assert ["nvjet_tst_192x192", "2.20", "s"] in map(str.split, explain(run).splitlines())


def test_a_run_that_does_not_count_says_so(tmp_path):
    for file in shutil.copytree(DP2, tmp_path / "run").rglob("*.json"):
        file.write_text(file.read_text().replace('"world_size": 2', '"world_size": 4'))
    title, why, *_ = explain(tmp_path / "run").splitlines()
    assert " on 2 x H200 SXM (not counted): 587 of " in title
    assert why == "this cannot be: GPU count is 2 in the record but 4 in its evidence"


def differences(run, other, *words):
    against = document(run, "--against", other, *words)["against"]
    apart = {one["name"]: one["flops"] for one in against["apart"]}
    total = sum(size or 0.0 for size in apart.values()) + sum(against["parts"].values())
    assert abs(against["here"] - against["there"] - total) < 1e3
    return against, apart


def test_two_runs_differ_first_by_their_fields_then_by_their_parts():
    probes = ("--set", f"probes={H100}")
    against, apart = differences(EXPERTS, EXPERTS.parents[1] / "moe_ep4_balanced/1", *probes)
    assert list(apart) == ["routing"]
    assert (against["apart"][0]["here"], against["apart"][0]["there"]) == ("natural", "balanced")
    assert apart["routing"] < -20e12
    assert abs(against["parts"]["rest"]) < 5e12
    # The same work on another day: what a late host cost is a part.
    against, apart = differences(RECOMPUTED.parents[1] / "tp2_mbs2/1", H100 / "earlier/megatron/tp2_mbs2/1", *probes)
    assert (apart, max(against["parts"], key=against["parts"].get)) == ({}, "host")
    against, apart = differences(RECOMPUTED.parents[1] / "tp2_mbs2/1", DP2, *probes)
    assert list(apart) == ["accelerator", "layout", "micro-batch"]
    assert all(size < 0 for size in apart.values())


def test_a_published_row_is_the_other_side_and_the_nearest_has_the_same_model_and_dtype():
    against, apart = differences(RECOMPUTED, "published")
    assert against["name"] == "dgx-cloud-llama-3.1-8b-bf16"
    against, apart = differences(DP2, "megatron-bridge-llama-3-70b-h100")
    assert {"dtype", "sequence", "model, layout"} <= apart.keys()
    assert against["low"] < against["here"] - against["parts"]["rest"] < against["high"]
    assert "llama-3-70b, TP4 PP8 VPP5 DP2" in [one["there"] for one in against["apart"]]
    done = run_command("explain", DP2, "--against", "nobody-s-row")
    assert done.returncode == 2
    assert done.stderr.startswith("error: There is no published row 'nobody-s-row'.")
