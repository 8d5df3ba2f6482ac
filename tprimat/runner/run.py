"""Run one plan: build its command, launch it, write its records and its benchmark file."""

import contextlib
import dataclasses
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tprimat.analyze.groups import price_of
from tprimat.analyze.metrics import MetricOptions, run_metrics
from tprimat.analyze.probes import under_ceiling
from tprimat.analyze.waterfall import Waterfall
from tprimat.config.load import absolute_path
from tprimat.core.errors import MetricError, RecordError
from tprimat.engines.base import engine_named
from tprimat.hardware.nodes import Nodes, gpus_of_ranks, job_name
from tprimat.launch.agreement import NodeGroup
from tprimat.launch.process import command_on
from tprimat.launch.run import Launch, run
from tprimat.plan.schema import RunPlan, write_plan
from tprimat.records.benchmark_file import benchmark_file_name, write_benchmark_file
from tprimat.records.discover import probes_in
from tprimat.records.environment import variables_of_run
from tprimat.records.schema import Machine, NodeRecord, RunMetrics, RunRecord, StepRecord
from tprimat.records.store import RunDirectory
from tprimat.runner.explain import lost_by, traces_of
from tprimat.runner.logs import FollowedLog
from tprimat.runner.nodes import this_node
from tprimat.runner.prediction import out_of_memory_hint
from tprimat.runner.progress import Progress
from tprimat.runner.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run that has ended: its record, steps and metrics."""

    record: RunRecord
    steps: tuple[StepRecord, ...]
    metrics: RunMetrics | None
    unmeasured: str | None
    benchmark_file: Path | None
    """None where it could not be written; the user has seen why."""
    log: Path
    traces: tuple[Path, ...] = ()
    lost: Waterfall | None = None


def announcement(plan: RunPlan) -> str:
    """Return the two lines that name the strategy and its layout, for console and log."""
    layout, batch = plan.workload.layout, plan.workload
    rare = (("VPP", layout.virtual_pipeline), ("CP", layout.context), ("EP", layout.expert))
    extra = "".join(f", {name}={size}" for name, size in rare if size not in {None, 1})
    extra += f", {plan.workload.routing} routing" if plan.workload.routing else ""
    capacity = plan.workload.expert_capacity_factor
    extra += "" if capacity is None else f", expert capacity {capacity:g}"
    extra += ", fully sharded" if plan.engine_options.fully_shard else ""
    return (
        f"Using parallelism strategy: {plan.strategy}\n"
        f"Parallelism: TP={layout.tensor}, PP={layout.pipeline}, DP={layout.data}{extra}, GradAccum={batch.accumulation_steps}"
    )


def log_path(session: Session, model: str) -> Path:
    """Return the log of a model: training_{model}.log in the output folder, or what LLAMA_LOG or QWEN_LOG names."""
    chosen = session.choices.model_logs.get(model)
    return absolute_path(chosen, f"the variable {model.upper()}_LOG") if chosen else session.output / f"training_{model}.log"


def run_plan(session: Session, plan: RunPlan, group: NodeGroup | None = None) -> TrainingRun:
    """Run a plan to its end, whatever the end is, and leave its records behind.

    `group` are the other nodes; None on one node, and where the engine starts them itself.
    """
    log, engine = log_path(session, plan.model), engine_named(plan.engine)
    record = _starting(plan, session.machine_of(plan), (this_node(plan),) if group is None else group.records)
    launch = Launch(
        command=command_on(plan, Nodes() if group is None else group.prepare(plan, record.started_at)),
        group=group,
        directory=RunDirectory(Path(plan.run_directory)),
        record=record,
        limits=session.loaded.config.benchmarking,
        planned_steps=plan.steps,
        sampled_gpus=() if plan.platform == "cpu" else gpus_of_ranks(plan.gpus_per_node),
        logs=(log,),
        heading=announcement(plan),
    )
    write_plan(launch.directory.plan_file, plan)
    if not engine.runs_worker:  # it only prints: steps and evidence come from its log, tracebacks from its ranks'
        printed = FollowedLog(plan, engine.read_line, record.started_at)
        launch = dataclasses.replace(
            launch, step_of_line=printed.step_of_line, complete=printed.complete, error_logs=engine.error_logs(plan)
        )
    progress = Progress(plan, record)
    record, steps = run(launch, progress)
    progress.close()
    if record.outcome == "out_of_memory":
        record = dataclasses.replace(record, hint=out_of_memory_hint(plan, record.machine, record.hint))
        launch.directory.write_run(record)
    return finish(session, record, steps, log)


def _starting(plan: RunPlan, machine: Machine, nodes: tuple[NodeRecord, ...]) -> RunRecord:
    engine = engine_named(plan.engine)
    return plan.begun_on(
        machine,
        clock=engine.clock,
        software=engine.software(plan),
        environment=variables_of_run(plan.environment),
        nodes=nodes,
        job=job_name(),
    )


def finish(session: Session, record: RunRecord, steps: tuple[StepRecord, ...], log: Path) -> TrainingRun:
    """Derive the metrics and write the benchmark file, of a failed run too, so that no older result stays in its place."""
    metrics, unmeasured = metrics_of(session, record, steps)
    path = session.output / benchmark_file_name(record)
    written: Path | None = path
    try:
        write_benchmark_file(path, record, steps, metrics)
    except RecordError as error:  # the run is over all the same, and the summary says how it went
        print(f"error: {error}", file=sys.stderr)
        written = None
    return TrainingRun(
        record=record,
        steps=steps,
        metrics=metrics,
        unmeasured=unmeasured,
        benchmark_file=written,
        log=log,
        traces=traces_of(session.output, record.run_id),
        lost=lost_by(metrics, session.output / "runs" / record.run_id, session.probes) if metrics else None,
    )


def load_run(session: Session, record: RunRecord) -> TrainingRun:
    """Read an earlier run with its steps, and write its benchmark file again: another run may have replaced it."""
    steps = RunDirectory(session.output / "runs" / record.run_id).read_steps()
    return finish(session, record, steps, log_path(session, record.model))


def renamed(run: TrainingRun, strategy: str, output: Path) -> TrainingRun:
    """Return a run as that of another strategy, which splits the model alike, with its benchmark file and log in that folder."""
    note = f"the run of {run.record.strategy}, which splits the model alike"
    evidence = run.record.evidence and dataclasses.replace(run.record.evidence, notes=(*run.record.evidence.notes, note))
    run_id = f"{run.record.run_id}-as-{strategy}"
    record = dataclasses.replace(run.record, run_id=run_id, strategy=strategy, evidence=evidence)
    path = output / benchmark_file_name(record)
    write_benchmark_file(path, record, run.steps, run.metrics)
    with contextlib.suppress(OSError):  # the first folder has it
        shutil.copyfile(run.log, output / run.log.name)
    return dataclasses.replace(run, record=record, benchmark_file=path)


def metrics_of(session: Session, record: RunRecord, steps: tuple[StepRecord, ...]) -> tuple[RunMetrics | None, str | None]:
    """Return the metrics by the configuration's conventions, or why there are none."""
    benchmarking = session.loaded.config.benchmarking
    options = MetricOptions(
        flops_convention=benchmarking.flops_convention,
        warmup=benchmarking.warmup_steps,
        cost_per_gpu_hour=price_of(record, benchmarking.cloud_costs),
        telemetry=RunDirectory(session.output / "runs" / record.run_id).read_telemetry(record.machine),
    )
    probes, damaged = probes_in([session.output, *session.probes])
    for problem in damaged:
        print(f"skipped: {problem}", file=sys.stderr)
    try:
        return run_metrics(record, steps, options=under_ceiling(options, record, probes)), None
    except MetricError as error:
        return None, f"{error.what} Try: {error.fix}" if error.fix else error.what
