"""Real trainings on a CPU with the profiling section switched on: what they leave behind."""

import json
from pathlib import Path

import pytest
from planning import make_plan, train_together

from tprimat.analyze.metrics import MetricOptions, run_metrics

SETTINGS = {
    "training.duration.max_steps": 8,
    "training.data.micro_batch_size": 1,
    "training.data.global_batch_size": 2,
    "training.data.sequence_length": 16,
    "profiling.enabled": True,
}


def profiled_plan(folder, schedule, ranks=1, **switches):
    settings = {**SETTINGS, "hardware.platforms.cpu.gpus_per_node": ranks, "profiling.schedule": schedule}
    settings |= {f"profiling.{key}": value for key, value in switches.items()}
    return make_plan(folder, "llama", settings, layers=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs: one cycle inside the run, and two cycles of which the second is cut short."""
    folder = tmp_path_factory.mktemp("profiled")
    plans = [
        profiled_plan(folder / "once", {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}, ranks=2, with_stack=True),
        profiled_plan(folder / "twice", {"wait": 0, "warmup": 1, "active": 4, "repeat": 2}),
    ]
    return {plan.run_id: (plan, *result) for plan, result in zip(plans, train_together(plans), strict=True)}


def load_trace(plan, cycle=1):
    return json.loads((Path(plan.output_directory) / "profiler" / plan.run_id / f"rank_0.{cycle}.pt.trace.json").read_text())


def steps_in(trace):
    return sorted(event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#"))


def test_one_file_stands_under_the_names_of_chrome_and_of_tensorboard(trained):
    plan, run, _ = trained["once"]
    assert (plan.workload.layout.world_size, load_trace(plan)["distributedInfo"]["rank"]) == (2, 0), "only rank 0 is profiled"
    assert run.profiled_steps.count(3) == 1
    folder = Path(plan.output_directory)
    traces = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "prof" in path.name or "trace" in path.name)
    assert traces == ["profile_cpu_llama_once.json", "profiler", "profiler/once/rank_0.1.pt.trace.json"]
    assert (folder / traces[0]).samefile(folder / traces[2])
    assert load_trace(plan)["tprimat"] == {
        "run_id": "once",
        "model": "llama",
        "strategy": plan.strategy,
        "platform": "cpu",
        "rank": 0,
        "step_of_profiler_step_0": 1,
    }


def test_the_trace_holds_the_active_steps_with_shapes_stacks_and_memory(trained):
    plan, *_ = trained["once"]
    trace = load_trace(plan)
    assert steps_in(trace) == ["ProfilerStep#2", "ProfilerStep#3"]
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    assert {"cpu_op", "python_function", "cpu_instant_event"} <= kinds
    assert "c10d::broadcast_" not in {event["name"] for event in trace["traceEvents"]}, "the host waits for the step before"
    assert any(event["name"] == "aten::mm" and event["args"]["Input Dims"] for event in trace["traceEvents"])
    assert (trace["with_stack"], trace["profile_memory"], trace["record_shapes"], "with_flops" in trace) == (1, 1, 1, False)


def test_the_record_says_which_steps_the_profiler_slowed_and_metrics_leave_them_out(trained):
    _, run, steps = trained["once"]
    assert run.profiled_steps == (2, 3, 4, 5)
    metrics = run_metrics(run, steps, options=MetricOptions(warmup=1))
    assert (metrics.window.first_step, metrics.window.steps) == (6, 3)
    assert metrics.window.rule["profiled"] == "2-5"


def test_a_second_cycle_has_a_trace_of_its_own_even_if_training_ends_in_it(trained):
    plan, run, steps = trained["twice"]
    assert steps_in(load_trace(plan, 1)) == [f"ProfilerStep#{i}" for i in (1, 2, 3, 4)]
    assert steps_in(load_trace(plan, 2)) == ["ProfilerStep#6", "ProfilerStep#7"]
    assert run.profiled_steps == tuple(range(1, 9))
    assert len(steps) == 8
