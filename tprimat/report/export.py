"""One row per run, flat, for notebooks and experiment trackers: the columns with their meaning, and the rows as CSV and JSON.

Units are SI: seconds, bytes, watts, FLOP/s, fractions 0..1. None is what was not recorded or measured; CSV leaves the cell empty.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tprimat.analyze.groups import Measured
from tprimat.analyze.roofline import watts_per_gpu
from tprimat.analyze.traits import processors, tokens_per_step
from tprimat.core.flops import parameters
from tprimat.records.schema import RunMetrics, RunRecord, StepRecord
from tprimat.report.catalogue import FLOPS, MFU, STEP_TIME, TOKENS, Metric
from tprimat.report.tables import csv_cell
from tprimat.report.words import finding_words

Value = bool | int | float | str | None
Row = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a run."""

    name: str
    meaning: str
    pick: Callable[[Measured], Value]
    measured: bool = False
    """A figure of the run, not what ran or how it ended."""
    kind: type = str
    """bool, int, float or str: of the values, in a column without any too."""


def _run(name: str, meaning: str, pick: Callable[[RunRecord], Value] | None = None, kind: type = str) -> Column:
    return Column(name, meaning, lambda item: (pick or (lambda run: getattr(run, name)))(item.result.run), kind=kind)


def _ran(name: str, meaning: str, kind: type = str) -> Column:
    return _run(name, meaning, lambda run: getattr(run.ran, name), kind)


def _measured(name: str, meaning: str, pick: Callable[[RunMetrics], Value] | None = None, kind: type = float) -> Column:
    def value(item: Measured) -> Value:
        found: Value = None if item.metrics is None else (pick or (lambda metrics: getattr(metrics, name)))(item.metrics)
        return found

    return Column(name, meaning, value, measured=True, kind=kind)


def _interval(metric: Metric, meaning: str) -> Iterator[Column]:
    """Yield three columns of an estimate: its value, and the ends of its 95 % interval over the steps of the run."""
    yield _measured(metric.key, meaning, lambda metrics: _part(metric, metrics, "value"))
    yield _measured(f"{metric.key}_low", f"{metric.key}: lower end of the 95 % interval", lambda m: _part(metric, m, "low"))
    yield _measured(f"{metric.key}_high", f"{metric.key}: upper end of the 95 % interval", lambda m: _part(metric, m, "high"))


def _part(metric: Metric, metrics: RunMetrics, end: str) -> float | None:
    found = metric.of_run(metrics)
    part: float | None = None if found is None else getattr(found, end)
    return part


COLUMNS: tuple[Column, ...] = (
    _run("run_id", "name of the run and of its folder"),
    Column("path", "file or folder that the run was read from", lambda item: str(item.result.path)),
    _run("started_at", "ISO 8601, UTC"),
    _run("ended_at", "ISO 8601, UTC"),
    Column("outcome", "completed, out_of_memory, failed, ...", lambda item: item.result.run.outcome),
    Column("counted", "whether analyses count the run", lambda item: item.not_counted is None, kind=bool),
    Column("not_counted_because", "why they do not", lambda item: item.not_counted),
    Column("cause", "why the run did not complete", lambda item: item.result.run.cause),
    _run("model", "key in config.yaml"),
    _run("size", "full or tiny"),
    _run("architecture", "name of the model's shape", lambda run: None if run.ran.shape is None else run.ran.shape.name),
    _run(
        "parameters",
        "weights of the model, each counted once",
        lambda run: None if run.ran.shape is None else parameters(run.ran.shape).total,
        kind=int,
    ),
    _run("strategy", "parallelism strategy"),
    _ran("tensor_parallel", "TP", kind=int),
    _ran("pipeline_parallel", "PP", kind=int),
    _ran("data_parallel", "DP", kind=int),
    _ran("context_parallel", "CP", kind=int),
    _ran("virtual_pipeline", "VPP, chunks of layers on each stage", kind=int),
    _ran("expert_parallel", "EP", kind=int),
    _ran("sequence_parallel", "as seen in the run", kind=bool),
    _run("engine", "framework that trained"),
    _run("platform", "cuda, rocm or cpu", lambda run: run.machine.platform),
    _run("accelerator", "device name", lambda run: run.machine.accelerator),
    _run("gpus", "world size; on a CPU, processes", lambda run: run.machine.gpus, kind=int),
    _run("nodes", "machines", lambda run: run.machine.nodes, kind=int),
    _run("accelerator_memory_bytes", "of one accelerator", lambda run: run.machine.memory_bytes, kind=int),
    _run("power_limit_watts", "of one accelerator", lambda run: run.machine.power_limit_watts, kind=float),
    _run("driver", "version", lambda run: run.machine.driver),
    _run("processor", "of each kind of node, with the cores that a run may use", processors),
    _ran("micro_batch_sequences", "sequences in one micro-batch", kind=int),
    _ran("global_batch_sequences", "sequences in one step", kind=int),
    _ran("accumulation_steps", "micro-batches of one replica in a step", kind=int),
    _ran("sequence_tokens", "tokens in one sequence", kind=int),
    _run("tokens_per_step", "tokens in one step, all GPUs", tokens_per_step, kind=int),
    _ran("matmul_dtype", "what the matrix units ran: bf16, fp8, fp32, ..."),
    _run(
        "recompute", "none, selective (of which modules, if not of attention alone) or full", lambda run: run.ran.recompute_words
    ),
    _ran("routing", "of tokens to experts: natural, or balanced by force"),
    _ran("attention", "as seen in the run"),
    _run(
        "transformer_engine",
        "as seen in the run",
        lambda run: None if run.evidence is None else run.evidence.transformer_engine,
        kind=bool,
    ),
    _ran("data", "as seen in the run"),
    _run("seed", "of weights and data", kind=int),
    _run("clock", "step_end: our callback; framework: the framework's own times"),
    _measured("n", "steady steps, over which all figures below are taken", lambda metrics: metrics.window.steps, kind=int),
    _measured("first_step", "first of them", lambda metrics: metrics.window.first_step, kind=int),
    _measured("last_step", "last of them", lambda metrics: metrics.window.last_step, kind=int),
    _measured("tokens_per_second", "all GPUs"),
    *_interval(TOKENS, "tokens/s of one GPU"),
    *_interval(FLOPS, "model FLOP/s of one GPU"),
    _measured("flops_convention", "how FLOP are counted: causal, full or 6n", kind=str),
    *_interval(MFU, "fraction of the dense peak"),
    _measured("mfu_absent_because", "why there is no MFU", kind=str),
    *_interval(STEP_TIME, "median step time"),
    _measured("mean_step_seconds", "basis of tokens_per_second"),
    _measured("step_seconds_mad", "scaled median absolute deviation of the step times"),
    _measured("peak_memory_bytes", "allocated on the worst rank; empty under CUDA graphs, which it would leave out", kind=int),
    _measured("peak_reserved_bytes", "reserved on the worst rank", kind=int),
    _measured("predicted_memory_error", "predicted peak over the measured one, minus 1"),
    _measured("predicted_step_error", "predicted step over the measured one, minus 1"),
    _measured("final_loss", "loss of the last step"),
    _measured("joules_per_token", "energy, all GPUs"),
    Column(
        "watts_per_gpu",
        "mean power of one GPU",
        lambda item: watts_per_gpu(item.result.run, item.metrics),
        measured=True,
        kind=float,
    ),
    _measured("gpu_busy", "share of time in which any kernel ran on a GPU, by the driver"),
    _measured("cost_per_million_tokens", "in the currency of the price of a GPU hour"),
    _measured("expert_load", "tokens of the busiest expert over the mean"),
    _measured("rank_load", "the same for the ranks that share the experts"),
    _measured("dropped", "share of expert choices that were dropped"),
    _measured(
        "warnings",
        "what to know about the figures",
        lambda metrics: "; ".join(map(finding_words, metrics.warnings)) or None,
        kind=str,
    ),
)
"""Of every run. Behind them follow version_*, option_* and variable_*, as far as any run has them."""


KINDS = {column.name: column.kind for column in COLUMNS}
"""Column -> kind of its values; version_*, option_* and variable_* are text."""


def rows_of(runs: Sequence[Measured]) -> list[Row]:
    """Return one row per run, all with the same columns in the same order."""
    rows = [{column.name: column.pick(item) for column in COLUMNS} | _software_and_options(item) for item in runs]
    names = dict.fromkeys(name for row in rows for name in row)
    ordered = [column.name for column in COLUMNS] + sorted(set(names) - {column.name for column in COLUMNS})
    return [{name: row.get(name) for name in ordered} for row in rows]


def _software_and_options(item: Measured) -> Row:
    """Return each package's version as version_NAME, the engine's switches as option_NAME, and variables as variable_NAME."""
    run = item.result.run
    versions = {f"version_{_identifier(name)}": version for name, version in run.software.items()}
    versions |= {f"variable_{name}": value for name, value in (run.environment or {}).items()}
    options = {f"option_{_identifier(name)}": str(value) for name, value in run.engine_options.items() if value is not None}
    return {**versions, **options}


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def step_values(step: StepRecord) -> dict[str, float]:
    """Return what is known of one step, for trackers that draw curves."""
    values = {
        "step_seconds": step.step_seconds,
        "tokens_per_second": step.tokens / step.step_seconds if step.tokens and step.step_seconds > 0 else None,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "learning_rate": step.learning_rate,
        "peak_memory_bytes": step.peak_allocated_bytes,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


MEASURED = frozenset(column.name for column in COLUMNS if column.measured)


def results_of(row: Row) -> dict[str, float]:
    """Return the numbers of a row that were measured."""
    return {name: float(value) for name, value in row.items() if name in MEASURED and isinstance(value, int | float)}


def settings_of(row: Row) -> dict[str, str]:
    """Return the rest of a row, which says what ran and how it ended, as text."""
    return {name: str(value) for name, value in row.items() if value is not None and name not in results_of(row)}


def comma_separated(rows: Sequence[Row]) -> str:
    """Format the rows as CSV with a header. Text that a spreadsheet would run as a formula begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows([csv_cell(value) for value in row.values()] for row in rows)
    return out.getvalue()


def as_json(rows: Sequence[Row]) -> str:
    """Format the rows as a JSON list of objects, as pandas.read_json reads it."""
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"
