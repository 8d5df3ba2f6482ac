"""What a sceptic would catch: verdicts without their losses or clocks, points that vanish, logs whose steps are not alike."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from changes import groups_of, jitter, ran_with, replace, slowed
from commands import run_command
from runs.make_runs import write_run

from tprimat.analyze.compare import rankings, verdict
from tprimat.analyze.groups import findings, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.core.workload import Obstacle
from tprimat.records.benchmark_file import write_benchmark_file
from tprimat.records.discover import load_results, read_result
from tprimat.records.schema import TelemetrySample
from tprimat.report.comparison import Comparison
from tprimat.report.explain import lost_most
from tprimat.report.summary import summary
from tprimat.report.words import finding_words, headline, not_counted_words, open_losses, sentence, told
from tprimat.runner.analysis import regression_gate
from tprimat.runner.explain import OBSTACLES, explained, lost_by

RUNS = Path(__file__).parents[1] / "runs"
WITH_ENERGY = RUNS.parents[1] / "benchmarks/records/h200/nemo-with-transformer-engine/dp2_mbs2/benchmark_cuda_llama.json"
FAST, SLOW = 0.95, 1.0


def three(times, *, seeds=(1, 2, 3), losses=1.0, hot=0.0, reason="thermal (hardware)", **fields):
    """Three recorded runs of one configuration: their times and losses multiplied, a share of their readings throttled."""
    results = []
    for result, seed in zip(load_results([RUNS / "mi300x"])[0], seeds, strict=True):
        evidence = replace(result.run.evidence, data="mock")
        run = {"run_id": f"{times}-{seed}-{losses}", "seed": seed, "evidence": evidence, "strategy": str(times), **fields}
        made = slowed(result, times, **run)
        steps = tuple(replace(one, loss=one.loss * losses) for one in made.steps)
        readings = [TelemetrySample(at_seconds=at, gpu=0, throttle_reasons=(reason,) * (at < 100 * hot)) for at in range(100)]
        results.append(replace(made, steps=steps, telemetry=tuple(readings)))
    return results


@pytest.mark.parametrize(
    ("other", "outcome", "words"),
    [
        ({}, "faster", ""),
        ({"losses": 1.1}, "other loss", "on the same data and seed the loss differs by +10.0 %"),
        ({"seeds": (4, 5, 6)}, "faster", "Losses not proven equal: seed is 3 on one side and 6 on the other"),
        ({"engine": "nemo"}, "faster", "two engines draw different initial weights from the same seed"),
        ({"seeds": (None,) * 3}, "faster", "Losses not proven equal: seed is 3 on one side and not recorded on the other"),
    ],
)
def test_losses_are_compared_by_seed_or_the_verdict_says_why_not(other, outcome, words):
    judged = verdict(*groups_of(*three(SLOW), *three(FAST, **other)))
    assert judged.outcome == outcome
    assert words in sentence(judged)
    assert (
        ("Losses not proven equal: " in sentence(judged))
        == bool(open_losses([judged]))
        == ("Losses" in words or "engines" in words)
    )
    (ranking,) = rankings(groups_of(*three(SLOW), *three(FAST, **other)))
    closed, undecided = regression_gate(Comparison(groups=(), verdicts=(judged,)), 0.03)
    won = outcome == "faster"
    assert (ranking.lead.outcome == "faster", any(line.startswith("No win: ") for line in headline(ranking))) == (won, not won)
    assert (len(closed), len(undecided)) == (0, 0 if won else 1)


def test_heat_on_the_slower_side_leaves_no_winner_and_no_gate_open_or_closed():
    slow, fast = groups_of(*three(SLOW, hot=0.4), *three(FAST))
    judged = verdict(slow, fast)
    assert (judged.outcome, judged.handicapped) == ("held back", "baseline")
    assert "no winner, because the clocks of" in sentence(judged)
    assert "thermal (hardware) in 40 % of its readings" in sentence(judged)
    (ranking,) = rankings([slow, fast])
    assert ranking.lead.outcome != "faster"
    assert "no winner, because the clocks of" in headline(ranking)[0]
    for pair in ((slow, fast), (fast, slow)):
        closed, (undecided,) = regression_gate(Comparison(groups=(), verdicts=(verdict(*pair),)), 0.03)
        assert not closed
        assert "Repeat it on GPUs whose clocks are free" in undecided


@pytest.mark.parametrize(
    ("side", "only"), [({}, True), ({"hot": 0.4}, False), ({"losses": 1.1}, False), ({"seeds": (4, 5, 6)}, False)]
)
def test_only_the_folders_differ_is_said_where_clocks_and_losses_do_not(side, only):
    judged = replace(verdict(*groups_of(*three(SLOW, **side), *three(FAST))), traits=(), folders=("before", "after"))
    assert ("Only the folders differ" in sentence(judged)) == only


def test_a_winner_in_spite_of_heat_is_one_and_a_power_cap_belongs_to_the_configuration():
    judged = verdict(*groups_of(*three(SLOW), *three(FAST, hot=0.4)))
    assert judged.outcome == "faster"
    assert "although the clocks of" in sentence(judged)
    judged = verdict(*groups_of(*three(SLOW, hot=0.9, reason="power cap"), *three(FAST, hot=0.1, reason="power cap")))
    assert (judged.outcome, judged.handicapped) == ("faster", None)
    assert "Clocks were held back: power cap in 10 % to 90 % of the readings." in sentence(judged)


def test_a_finding_of_several_runs_is_said_once_with_the_least_and_the_largest_number():
    capped = [three(times, hot=hot, reason="power cap")[0] for times, hot in ((1, 0.64), (1.1, 1), (1.2, 0.64))]
    doubts = findings(groups_of(*capped, *three(1.3, hot=0.08)[:1]), lambda item: item.result.run.strategy)
    lines = [line for line in told(doubts) if line.startswith("Clocks")]
    assert lines == [
        "Clocks were held back in 64 to 100 % of the readings: power cap: 3 runs",
        "Clocks were held back in 8 % of the readings: thermal (hardware): 1.3",
    ]


def test_a_benchmark_file_alone_still_says_that_clocks_were_held_back(tmp_path):
    source = RUNS / "h100" / "runs" / "h100-llama-0"
    place = tmp_path / "runs" / "hot"
    place.mkdir(parents=True)
    for name in ("run.json", "steps.jsonl"):
        (place / name).write_bytes((source / name).read_bytes())
    result = read_result(place)
    telemetry = tuple(TelemetrySample(at_seconds=at, gpu=0, throttle_reasons=("power cap",) * (at % 4 > 0)) for at in range(40))
    metrics = measure(replace(result, telemetry=telemetry), MetricOptions()).metrics
    assert metrics.held_back == {"power cap": 0.75}
    write_benchmark_file(tmp_path / "benchmark_cuda_llama.json", result.run, result.steps, metrics)
    alone = read_result(tmp_path / "benchmark_cuda_llama.json")
    assert measure(alone, MetricOptions()).metrics.held_back == {"power cap": 0.75}


def test_a_benchmark_file_alone_still_says_what_energy_its_steps_took(tmp_path):
    file = tmp_path / "benchmark_cuda_llama.json"
    document = json.loads(WITH_ENERGY.read_text(encoding="utf8"))
    stated, window = document["metrics"]["joules_per_token"], document["metrics"]["window"]

    def energy(warmup="auto", version=document["schema_version"], **changes):
        changed = {**document, "schema_version": version, "metrics": {**document["metrics"], **changes}}
        file.write_text(json.dumps(changed), encoding="utf8")
        metrics = measure(read_result(file), MetricOptions(warmup=warmup)).metrics
        assert ("energy of other steps" in {one.kind for one in metrics.warnings}) == (bool(changes) or warmup not in {"auto", 1})
        return metrics.joules_per_token

    assert energy() == energy(warmup=window["first_step"] - 1) == stated > 0
    assert energy(warmup=window["first_step"] + 1) is None
    strange = ({"last_step": 10**15}, {"first_step": -(10**15)}, {"first_step": 9, "last_step": -9}, {"left_out": [3, 4, 5]})
    assert [energy(window={**window, **change}) for change in strange] == [None] * 4
    for change in ({"joules_per_token": 10**400}, {"window": "1-6"}):
        changed = {**document, "metrics": {**document["metrics"], **change}}
        file.write_text(json.dumps(changed), encoding="utf8")
        assert measure(read_result(file), MetricOptions()).metrics.joules_per_token is None
    changed = {**document, "metrics": {**document["metrics"], "joules_per_token": 0.1}}
    file.write_text(json.dumps(changed), encoding="utf8")
    assert "W per GPU, but its limit is 700 W" in not_counted_words(measure(read_result(file), MetricOptions()))


def write(folder, result, gpus, times=1.0, **fields):
    machine = replace(result.run.machine, gpus_per_node=gpus)
    factors = [8 / gpus * times * by for by in jitter(fields["run_id"], len(result.steps))]
    made = slowed(result, factors, machine=machine, **{"data_parallel": gpus, **fields})
    write_run(folder, made.run, made.steps)


def test_scaling_names_every_run_that_is_no_point_and_why(tmp_path):
    result = read_result(RUNS / "h100" / "runs" / "h100-llama-0")
    for gpus in (2, 4, 8):
        write(tmp_path, result, gpus, 1 + gpus / 100, run_id=f"on-{gpus}")
    write(tmp_path, result, 8, 1.1, run_id="split", tensor_parallel=2, data_parallel=4)
    write(tmp_path, result, 4, 0.7, run_id="narrow", matmul_dtype="fp8")
    write(tmp_path, result, 4, 1.2, run_id="unlike", software={"torch": "9"})
    write(tmp_path, result, 2, run_id="broken", outcome="failed", cause="rank 3 ended")
    done = run_command("scaling", tmp_path, "--format", "json", "--output", tmp_path, cwd=tmp_path)
    (series,) = json.loads(done.stdout)
    reasons = [one["why"].split(",")[0] for one in series["left_out"]]
    assert reasons == 3 * ["alone in its layout and work"] + ["failed: rank 3 ended"]
    assert sum(line.startswith("Not a point here, ") for line in series["remarks"]) == 2
    assert any(line.startswith("1 run per point: intervals are between the steps of one") for line in series["remarks"])


def test_a_peak_within_noise_says_so_where_it_is_quoted(tmp_path):
    result = read_result(RUNS / "h100" / "runs" / "h100-llama-0")
    write(tmp_path, result, 8, run_id="a", strategy="dp")
    write(tmp_path, result, 8, 1.0005, run_id="b", strategy="other")
    write(tmp_path, result, 8, 1.2, run_id="c", matmul_dtype="fp8")
    out = run_command("analyze_peak_throughput.py", "--results-dir", tmp_path, cwd=tmp_path).stdout
    assert re.search(r"lead                No winner: (dp|other) leads, and (dp|other) is within noise \(0\.\d % \[", out)


# Logs.

DUMP = """using world size: 8, data-parallel size: 8, context-parallel size: 1
------------------------ arguments ------------------------
  bf16 ............................................ True
  seq_length ...................................... 8192
  world_size ...................................... 8
{more}-------------------- end of arguments ---------------------
"""


def iteration(step, seconds, *, batch=128, consumed=None, last=60, more="", loss="1.1E+01"):
    return (
        f" [2026-08-22 07:39:11.165432] iteration {step:8d}/{last:8d} | consumed samples: {consumed or step * batch:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | learning rate: 1.0E-05 | global batch size: {batch:5d} | "
        f"lm loss: {loss} | loss scale: 1.0 | grad norm: 5.1 | number of skipped iterations:   0 |{more}\n"
    )


END = "[after training is done] datetime: 2026-08-22 07:41:02 \n"


@pytest.fixture
def extracted(tmp_path):
    """Extract a log; return the process and the result, None where there is none."""

    def run(text, *flags, model="llama", gpu="NVIDIA H100 80GB HBM3", name="train.log"):
        (tmp_path / name).write_text(text, encoding="utf8")
        words = ("--log-file", tmp_path / name, "--model-name", model, "--output", tmp_path / "out.json", *flags)
        done = run_command("extract_primus_metrics.py", *words, *(("--gpu", gpu) if gpu else ()))
        return done, read_result(tmp_path / "out.json") if (tmp_path / "out.json").exists() else None

    return run


@pytest.mark.parametrize("interval", [1, 5])
def test_steps_of_a_batch_ramp_up_do_not_count(interval, extracted):
    consumed, text, seconds = 0, DUMP.format(more=""), []
    for step in range(1, 61):
        batch = min(128, 32 * (1 + (step - 1) // 13))
        consumed += batch
        seconds.append(batch / 10 + 10 * (step == 1))
        if step % interval == 0:
            text += iteration(step, sum(seconds[-interval:]) / interval, batch=batch, consumed=consumed)
    done, result = extracted(text + END)
    assert done.returncode == 0, done.stderr
    assert {step.tokens for step in result.steps} == {128 * 8192}
    assert {step.step_seconds for step in result.steps} == {12.8}
    assert "only steps with the last count" in done.stdout + done.stderr
    assert f"{10 * 8192 / 8:,.0f} [" in done.stdout


LATE = "the log begins at step {}, which takes 2.14 times as long as the others: left out as start-up"


@pytest.mark.parametrize(
    ("first", "interval", "steps", "note"),
    [
        (1001, 1, [1002, 1003], LATE),
        (1010, 10, [1020, 1030], LATE),
        (10, 10, [20, 30], "left out, since it is a mean with start-up: step 10"),
    ],
)
def test_a_first_line_that_holds_start_up_does_not_count_without_a_trace_of_it(first, interval, steps, note, extracted):
    times = (30.0, 14.0, 14.01)
    done, result = extracted(
        DUMP.format(more="") + "".join(iteration(first + interval * i, one, last=steps[-1]) for i, one in enumerate(times)) + END
    )
    assert [step.step for step in result.steps] == steps
    assert note.format(first) in done.stdout


MOE = r"  ((?:num|hidden|ffn|group|kv_channels|swiglu|moe_ffn|moe_layer|moe_router_topk|qk_layernorm)\w*) \.+ (.*)"


def moe(**settings):
    """The shape of Qwen3 30B A3B as the arguments of a log have it, a mixture of 128 experts, and other arguments."""
    shape = dict(re.findall(MOE, (RUNS.parent / "logs" / "primus_qwen3_30b_a3b.log").read_text(encoding="utf8")))
    known = shape | {"padded_vocab_size": 151936} | settings
    return "".join(f"  {name} ................ {value}\n" for name, value in known.items())


def steady(**fields):
    return "".join(iteration(step, 14.0 + 30 * (step == 1), last=12, **fields) for step in range(1, 13)) + END


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (moe(moe_router_force_load_balancing=True), "balanced routing"),
        (moe(moe_router_force_load_balancing=False), "natural routing"),
        (moe(), "routing unknown"),
        (moe(moe_expert_capacity_factor=1.25), "above a capacity of 1.25, and the log does not say how many: no FLOP, no MFU"),
    ],
)
def test_how_experts_were_fed_is_said_beside_the_rate(more, says, extracted):
    done, _ = extracted(DUMP.format(more=more) + steady(), model="auto")
    assert done.returncode == 0, done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("argument", "caution"), [("reset_attention_mask", "attention ends at each document"), ("sft", "tokens include padding")]
)
def test_what_makes_a_step_smaller_than_it_looks_follows_the_run_into_every_analysis(argument, caution, extracted, tmp_path):
    done, result = extracted(DUMP.format(more=f"  {argument} ................ True\n") + steady())
    assert caution in done.stdout
    assert any(caution in finding_words(one) for one in measure(result, MetricOptions()).metrics.warnings)
    done, result = extracted(DUMP.format(more=f"  {argument} ................ False\n") + steady())
    assert caution not in done.stdout


@pytest.mark.parametrize(
    ("more", "model", "says"),
    [
        ("  decoder_seq_length .............. 128\n", "llama", "decoder_seq_length is 128"),
        ("  window_size ..................... (1024,0)\n", "llama", "window_size is (1024,0)"),
        (moe() + "  decoder_seq_length .............. 128\n", "auto", "layers other than full attention"),
    ],
)
def test_work_whose_flop_are_not_counted_is_refused(more, model, says, extracted):
    done, result = extracted(DUMP.format(more=more) + steady(), model=model)
    assert (done.returncode, result, says in done.stderr) == (2, None, True)


def test_another_configuration_earlier_in_the_log_and_missing_lines_are_named(extracted):
    text = DUMP.format(more="") + "".join(iteration(step, 14.0, last=4) for step in range(1, 5))
    text += DUMP.format(more="") + "".join(iteration(step, 28.0, batch=256, last=12) for step in (1, 2, 3, 4, 8, 9, 10, 11, 12))
    done, result = extracted(text + END)
    assert result.run.ran.global_batch_sequences == 256
    assert "attempt 1 of 2: completed after step 4" in done.stdout + done.stderr
    assert "lines are missing in the log: from step 5 on" in done.stdout


MAXTEXT = """Num_devices: 8, shape (1, 1, 8)
Config param dtype: bfloat16
Config param global_batch_size_to_train_on: 24
Config param max_target_length: 8192
"""
NEMO = "".join(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/8\n" for rank in range(8))
BRIDGE = "model:\n  bf16: true\n  context_parallel_size: 1\n  pipeline_model_parallel_size: 1\n  seq_length: 8192\n"
BRIDGE += "  tensor_model_parallel_size: 1\n"


def completed(step):
    return f"completed step: {step}, seconds: 2.660, Tokens/s/device: 9239.1, total_weights: 196608, loss: 9.1\n"


def epoch(step, consumed=128):
    return (
        f"Training epoch 0, iteration {step}/11 | lr: 1e-05 | global_batch_size: 128 | global_step: {step} | "
        f"train_step_timing in s: 14.01 | consumed_samples: {(step + 1) * consumed}\n"
    )


def bridge(step):
    return f"Step Time : 14.00s GPU utilization: 481.9MODEL_TFLOP/s/GPU\n{iteration(step, 14.0, last=12)}"


@pytest.mark.parametrize(
    ("log", "flags", "status", "says"),
    [
        ((MAXTEXT, completed), (), 0, "9,239 ["),
        ((MAXTEXT + "Config param attention_type: local_sliding\n", completed), (), 2, "window_size is local_sliding"),
        ((NEMO, epoch), ("--sequence-length", 8192), 0, "nothing in the log shows which model ran"),
        ((NEMO, lambda step: epoch(step, 256)), ("--sequence-length", 8192), 2, "consumed samples grow by 256 a step"),
        (
            (NEMO + "[NeMo I] Adding lora to: 0.self_attention.linear_qkv\n", epoch),
            ("--sequence-length", 8192),
            2,
            "peft is lora",
        ),
        ((BRIDGE + "peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n", bridge), ("--num-gpus", 8), 2, "peft is lora"),
        (
            (BRIDGE + "dataset:\n    packed_sequence_size: 8192\n", bridge),
            ("--num-gpus", 8),
            0,
            "attention ends at each document",
        ),
        ((BRIDGE + "dataset:\n    packed_sequence_size: -1\n", bridge), ("--num-gpus", 8), 0, "9,362 ["),
    ],
)
def test_logs_of_other_frameworks_say_what_their_rates_leave_out(log, flags, status, says, extracted):
    head, line = log
    begin = 0 if head.startswith(("Num_devices", "Initializing")) else 1
    done, _ = extracted(head + "".join(map(line, range(begin, begin + 12))), *flags)
    assert (done.returncode, says in done.stdout + done.stderr) == (status, True), done.stdout + done.stderr


H100_RECORDS = RUNS.parents[1] / "benchmarks" / "records" / "h100"


def test_gpus_without_a_kernel_are_seen_in_the_drivers_readings_of_the_steady_steps():
    """Two H100 under TP2, whose host was late, and with CUDA graphs."""
    (late, *others), _ = load_results([H100_RECORDS / "earlier" / "megatron" / "tp2_mbs2"])
    (graphs,), _ = load_results([H100_RECORDS / "cuda-graphs"])
    assert len(others) == 2
    assert measure(late, MetricOptions()).metrics.gpu_busy == pytest.approx(0.78, abs=0.02)
    assert measure(graphs, MetricOptions()).metrics.gpu_busy == pytest.approx(0.99, abs=0.005)
    assert measure(replace(late, telemetry=()), MetricOptions()).metrics.gpu_busy is None


@pytest.mark.parametrize(
    ("change", "why_not"),
    [
        ({}, ""),
        ({"pipeline_parallel": 2}, ""),
        ({"recompute": "full"}, "recomputation"),
        ({"engine_options": {"cuda_graph_impl": "none"}}, None),
        ({"engine_options": {"layers": "local", "overlap_tensor_parallel": True, "fully_shard": True}}, "fully_shard"),
    ],
)
def test_waiting_gpus_are_a_part_of_their_own_and_graphs_are_offered_where_they_can_help(change, why_not):
    results, _ = load_results([H100_RECORDS / "earlier" / "megatron" / "tp2_mbs2"])
    measured = measure(results[0], MetricOptions())
    changed = replace(measured, result=replace(measured.result, run=ran_with(measured.result.run, **change)))
    answer = explained(changed, ())
    (idle,) = (loss for loss in answer.parts.losses if loss.name == "host")
    assert (round(idle.seconds / answer.parts.step_seconds, 2), idle.known_by) == (0.23, "run")
    (advice,) = (one for one in answer.advice if one.name == "host")
    assert ("--set platform_optimizations.nvidia.engine_options.cuda_graphs=true" in advice.words) == (why_not == "")
    assert advice.remark == (f"CUDA graphs, which wait for no host, do not run with {why_not}" if why_not else "")
    assert {*OBSTACLES} == {*get_args(Obstacle)}


def test_the_summary_of_a_run_ends_with_its_largest_losses():
    (late, *_), _ = load_results([H100_RECORDS / "earlier" / "megatron" / "tp2_mbs2"])
    metrics = measure(late, MetricOptions()).metrics
    text = "\n".join(lost_most(lost_by(metrics, late.path, ())))
    first, *others = text.splitlines()[-3:]
    assert first.startswith("  lost most to   GPU idle, host late: 2")
    assert all(line.startswith(" " * 17) and "TFLOP/s/GPU, " in line for line in others)


def test_a_caution_is_told_once():
    (run, *_), _ = load_results([H100_RECORDS.parent / "h200" / "cuda-graphs" / "second-machine" / "megatron-graphs"])
    text = summary([(run.run, measure(run, MetricOptions()).metrics, Path("log"))])
    assert text.count("CUDA graphs over replicas") == 1
