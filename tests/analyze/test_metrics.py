"""run_metrics against figures worked out by hand, and its reasons where a figure is absent."""

import numpy as np
import pytest
from changes import replace
from runs.make_runs import H100, a_run

from tprimat.analyze.groups import measure, price_of
from tprimat.analyze.metrics import MetricOptions, run_metrics, stragglers
from tprimat.core.models import model_shape
from tprimat.records.discover import read_result
from tprimat.records.schema import NodeRecord, RunPrediction, StepRecord, TelemetrySample
from tprimat.records.store import RunDirectory
from tprimat.report.summary import summary
from tprimat.report.words import finding_words, without_mfu

RUN = a_run("r1", evidence=None)
MIXTURE = replace(RUN, model="mixtral", shape=model_shape("mixtral-8x7b"))


def steps_of(seconds, **fields):
    ends = np.cumsum(seconds)
    return [
        StepRecord(step=i, step_seconds=float(s), tokens=128 * 2048, ended_at_seconds=float(end), **fields)
        for i, (s, end) in enumerate(zip(seconds, ends, strict=True), 1)
    ]


def kinds(metrics):
    return [finding.kind for finding in metrics.warnings]


def with_machine(**fields):
    return replace(RUN, machine=replace(H100, **fields))


KEEP = MetricOptions(warmup=0)


def test_throughput_weighs_a_slow_step_by_what_it_cost():
    metrics = run_metrics(RUN, steps_of([1.0, 3.0]), options=KEEP)
    assert metrics.tokens_per_second == 2 * 128 * 2048 / 4
    assert metrics.tokens_per_second_per_gpu.value == metrics.tokens_per_second / 8
    assert (metrics.mean_step_seconds, metrics.steps_per_second, metrics.step_seconds.value) == (2.0, 0.5, 2.0)


def test_the_published_h100_row_is_rebased_as_the_literature_does():
    """59,175 tokens/s on 8 H100: 345 TFLOP/s per GPU counted causally, 34.9 % of the dense bf16 peak."""
    metrics = run_metrics(RUN, steps_of([128 * 2048 / 59175] * 3), options=KEEP)
    assert metrics.model_flops_per_second_per_gpu.value == pytest.approx(345e12, rel=0.002)
    assert metrics.mfu.value == pytest.approx(0.349, abs=0.0005)
    assert metrics.mfu_absent_because is None


def test_dropped_choices_of_experts_are_no_work():
    shape = model_shape("mixtral-8x7b")
    whole, half = (
        run_metrics(replace(MIXTURE, expert_capacity=1.0), steps_of([4.0] * 3, dropped=share), options=KEEP)
        for share in (0.0, 0.5)
    )
    spared = 6 * 0.5 * 2 * 3 * shape.hidden * shape.expert_ffn * shape.layers  # gate, up and down of one of two experts
    assert whole.flop_per_token - half.flop_per_token == pytest.approx(spared)
    assert half.mfu.value / whole.mfu.value == pytest.approx(half.flop_per_token / whole.flop_per_token)
    assert half.tokens_per_second == whole.tokens_per_second


def test_without_the_dropped_share_there_is_no_flop():
    unknown = run_metrics(replace(MIXTURE, expert_capacity=1.25), steps_of([4.0] * 3), options=KEEP)
    assert (unknown.flop_per_token, unknown.mfu) == (None, None)
    assert "dropped at a capacity of 1.25" in without_mfu(unknown)
    assert run_metrics(replace(MIXTURE, expert_capacity="unlimited"), steps_of([4.0] * 3), options=KEEP).mfu


@pytest.mark.parametrize(
    ("capacity", "dropped", "compared"),
    [("unlimited", 0.0, True), (None, None, True), (9.0, 0.0, True), (1.25, 0.1, False), (1.25, None, False)],
)
def test_a_prediction_is_not_compared_with_a_run_that_drops_choices(capacity, dropped, compared):
    prediction = RunPrediction(
        allocated_bytes=86 * 2**30,
        reserved_bytes=88 * 2**30,
        memory={},
        stage=0,
        moment="loss",
        step_seconds=4.4,
        rates="published",
    )
    run = replace(MIXTURE, expert_capacity=capacity, prediction=prediction)
    steps = steps_of([4.0] * 3, dropped=dropped, peak_allocated_bytes=81 * 2**30)
    metrics = run_metrics(run, steps, options=KEEP)
    assert (metrics.predicted_memory_error is not None) is (metrics.predicted_step_error is not None) is compared
    line = next(line for line in summary([(run, metrics, None)]).splitlines() if line.startswith("  predicted"))
    assert ("86.0 GiB and the step were predicted without dropped choices" in line) is not compared


@pytest.mark.parametrize(
    ("options", "graphs"),
    [({"cuda_graph_impl": ["attn"]}, True), ({"enable_cuda_graph": True}, True), ({"cuda_graph_impl": "none"}, False)],
)
def test_what_cuda_graphs_hold_is_not_taken_for_little_memory(options, graphs, tmp_path):
    """NeMo with CUDA graphs on one H100: 59.2 GiB allocated, 74.6 GiB reserved."""
    prediction = RunPrediction(
        allocated_bytes=72 * 2**30, reserved_bytes=75 * 2**30, memory={}, stage=0, moment="loss", step_seconds=4.4
    )
    run = replace(RUN, engine="nemo", engine_options=options, prediction=prediction)
    steps = steps_of([4.0] * 3, peak_allocated_bytes=60 * 2**30, peak_reserved_bytes=75 * 2**30)
    metrics = run_metrics(run, steps, options=KEEP)
    assert metrics.peak_memory_bytes == (None if graphs else 60 * 2**30)
    assert metrics.peak_reserved_bytes == 75 * 2**30
    assert metrics.predicted_memory_error == pytest.approx(0 if graphs else 0.2)
    assert ("memory of graphs" in kinds(metrics)) is graphs
    text = summary([(run, metrics, None)])
    assert ("75.0 GiB reserved on the worst rank" in text) is graphs
    assert ("memory 75.0 GiB (0.0 %)" in text) is graphs
    directory = RunDirectory(tmp_path / "runs" / "one")
    directory.write_run(run)
    for step in steps:
        directory.append_step(step)
    measured = measure(read_result(directory.path), KEEP)
    assert {step.peak_allocated_bytes for step in measured.result.steps} == {None if graphs else 60 * 2**30}


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (with_machine(platform="cpu", accelerator="EPYC 9654"), "CPU"),
        (with_machine(accelerator="NVIDIA H900"), "NVIDIA H900"),
        (with_machine(accelerator=None), "accelerator is not recorded"),
        (with_machine(nodes=None), "number of GPUs"),
        (replace(RUN, matmul_dtype=None), "dtype that ran"),
        (replace(RUN, matmul_dtype="int2"), "int2"),
        (replace(RUN, shape=None), "shape"),
        (replace(RUN, sequence_tokens=None), "sequence length"),
    ],
)
def test_mfu_is_absent_with_its_reason(run, reason):
    metrics = run_metrics(run, steps_of([4.0] * 3), options=KEEP)
    assert metrics.mfu is None
    assert reason in without_mfu(metrics)


def test_one_step_has_a_value_without_an_interval():
    metrics = run_metrics(RUN, steps_of([4.0]), options=KEEP)
    assert metrics.tokens_per_second_per_gpu.low is None
    assert (metrics.step_seconds.high, metrics.step_seconds.samples) == (None, 1)
    assert "few steps" in kinds(metrics)


def test_memory_is_the_worst_inside_the_window_and_loss_the_last():
    steps = [
        replace(step, peak_allocated_bytes=size, loss=loss)
        for step, size, loss in zip(steps_of([9.0, 4.0, 4.0]), (90, 50, 60), (11.0, 10.0, None), strict=True)
    ]
    metrics = run_metrics(RUN, steps, options=MetricOptions(warmup=1))
    assert (metrics.peak_memory_bytes, metrics.final_loss) == (60, 10.0)


def test_a_price_is_found_by_short_name_or_device_name_and_that_of_another_gpu_is_not_taken():
    for name in ("H100 SXM", "NVIDIA H100 80GB HBM3"):
        assert price_of(RUN, {"MI300X": 2.0, name: 2.5}) == 2.5
    assert price_of(RUN, {"H100 PCIe": 2.0, "H200": 3.5}) is None


def test_cost_and_share_of_the_ceiling_follow_from_throughput():
    options = MetricOptions(warmup=0, cost_per_gpu_hour=3.0, gemm_ceiling_flops=794e12)
    metrics = run_metrics(RUN, steps_of([4.0] * 3), options=options)
    assert metrics.cost_per_million_tokens == pytest.approx(3.0 * 8 / 3600 / (128 * 2048 / 4.0) * 1e6)
    assert metrics.share_of_measured_gemm == pytest.approx(metrics.model_flops_per_second_per_gpu.value / 794e12)


def readings(gpus, watts=lambda at: 500.0, until=40.0):
    return [
        TelemetrySample(at_seconds=float(at), gpu=gpu, power_watts=watts(at))
        for at in np.arange(0, until + 0.5, 0.5)
        for gpu in range(gpus)
    ]


def test_energy_is_power_integrated_over_the_window_of_all_gpus():
    ramp = readings(8, watts=lambda at: 100 + 10 * at)
    metrics = run_metrics(RUN, steps_of([4.0] * 10), options=MetricOptions(warmup=2, telemetry=ramp))
    joules = 8 * (100 * 32 + 5 * (40**2 - 8**2))
    assert metrics.joules_per_token == pytest.approx(joules / (8 * 128 * 2048))


@pytest.mark.parametrize(
    ("telemetry", "reason"),
    [
        (readings(7), "power was read on 7 of 8 GPUs"),
        (readings(8, until=20.0), "power readings of 8 of 8 GPUs do not span"),
        (readings(8)[:8], "do not span"),
    ],
)
def test_energy_is_absent_where_readings_are_missing(telemetry, reason):
    steps = steps_of([4.0] * 10)
    metrics = run_metrics(RUN, steps, options=MetricOptions(telemetry=telemetry))
    assert metrics.joules_per_token is None
    assert any(reason in finding_words(finding) for finding in metrics.warnings)
    no_ends = run_metrics(
        RUN, [replace(step, ended_at_seconds=None) for step in steps], options=MetricOptions(telemetry=readings(8))
    )
    assert (no_ends.joules_per_token, "no ends of steps" in kinds(no_ends)) == (None, True)
    profiled = run_metrics(replace(RUN, profiled_steps=(5,)), steps, options=MetricOptions(telemetry=readings(8)))
    assert (profiled.joules_per_token, "energy of profiled steps" in kinds(profiled)) == (None, True)


def test_what_a_reader_must_know_are_findings():
    hot = [TelemetrySample(at_seconds=1.0, gpu=0, throttle_reasons=("SW Thermal Slowdown",))]
    steps = steps_of([9.0, *([4.0, 4.01] * 10), 9.0], finite=False)
    metrics = run_metrics(replace(RUN, clock="framework"), steps, options=MetricOptions(telemetry=hot))
    assert kinds(metrics) == ["outliers", "not finite", "framework's clock", "clocks"]
    assert finding_words(metrics.warnings[-1]) == "clocks were held back in 100 % of the readings: SW Thermal Slowdown"


def test_drift_is_told_over_the_whole_window_and_only_where_it_matters():
    rising = run_metrics(RUN, steps_of(4 * (1 + 0.001 * np.arange(40))))
    assert finding_words(rising.warnings[0]).startswith("step time drifts by +3.8 % over the steady steps")
    tiny = run_metrics(RUN, steps_of(4 * (1 + 0.00001 * np.arange(40))))
    assert tiny.window.drift_per_step is not None
    assert "drift" not in kinds(tiny)


def test_a_rank_that_makes_the_others_wait_is_named_with_its_node():
    nodes = tuple(NodeRecord(host=host, accelerator="NVIDIA H200", gpus=2) for host in ("gpu1", "gpu2"))
    machine = replace(H100, gpus_per_node=2, nodes=2)
    run = replace(RUN, machine=machine, nodes=nodes, pipeline_parallel=1, rank_seconds=(1.0, 1.0, 1.0, 1.3))
    named = "rank 3 (GPU 1 on gpu2) takes 30.0 % longer than its peers, which wait"
    assert list(map(finding_words, stragglers(run))) == [named]
    staged = replace(run, pipeline_parallel=2, rank_seconds=(1.0, 1.04, 2.0, 2.04))
    assert stragglers(staged) == [], "stages differ by their layers, the ranks of one stage should not"
    assert stragglers(replace(run, rank_seconds=())) == []
    assert stragglers(replace(run, machine=replace(machine, platform="cpu"))) == []
