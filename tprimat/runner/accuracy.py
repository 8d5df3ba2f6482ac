"""Score predictions: against our own records with the machine's probes, and rows of Megatron-LM's tests."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tprimat.analyze.groups import Measured
from tprimat.analyze.memory import ran_from_graphs
from tprimat.analyze.metrics import MetricOptions, drops_choices
from tprimat.analyze.traits import TRAITS
from tprimat.core.accelerators import Accelerator, find_accelerator
from tprimat.core.errors import RecordError
from tprimat.core.flops import parameters
from tprimat.core.megatron_cases import options_left_out
from tprimat.predict.accuracy import Score, with_factors
from tprimat.predict.megatron_options import workload_of_options
from tprimat.predict.memory import predict_memory, predict_memory_of_last_stage
from tprimat.predict.others import calculon_estimate, megatron_estimate
from tprimat.predict.rates import published_rates
from tprimat.predict.time import predict_time
from tprimat.predict.workload import Workload
from tprimat.records.discover import probes_in
from tprimat.records.evidence import layers_in_bf16
from tprimat.records.schema import RunRecord
from tprimat.records.store import read_text
from tprimat.report.plan import layout_name
from tprimat.report.tables import plural
from tprimat.runner.analysis import read_results
from tprimat.runner.planning import rates_of
from tprimat.runner.prediction import recorded_workload

FEWEST_STEPS = 5
GPUS_OF_A_TEST = 8
GPUS_OF_A_GB200_NODE = 4
MACHINES = {"a100": "A100 SXM 80GB", "h100": "H100 SXM", "gb200": "GB200"}
"""As rows of Megatron-LM's tests call them -> name in the table."""
LARGE_BYTES, SMALL_BYTES = 4e9, 1e9
LARGE_MODEL, LARGE_MODELS = 5e9, "5 billion parameters and more"
CALCULON, MEGATRON = "calculon", "Megatron-LM's estimator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All scores."""

    memory: tuple[Score, ...] = ()
    time: tuple[Score, ...] = ()
    """Of our records, with probes where there are some."""
    foretold: tuple[tuple[Score, Score], ...] = ()
    """Memory and time of our records as they were predicted before each run, by the version of that day."""
    time_without_probes: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    workload: Workload
    measured: Measured
    accelerator: Accelerator


def score_records(paths: Sequence[Path], probes: Sequence[Path]) -> Ledger:
    """Score the results in some folders."""
    return score_runs(read_results(paths, MetricOptions(), {}).measured, probes)


def score_runs(results: Sequence[Measured], probes: Sequence[Path]) -> Ledger:
    """Score some runs: each configuration on each accelerator once, at the median of its runs.

    Those that drop choices of experts are left out.
    """
    runs: dict[tuple[Workload, str, str | None, str], list[_Run]] = {}
    for measured in results:
        run, workload = measured.result.run, recorded_workload(measured.result.run)
        accelerator = find_accelerator(run.machine.accelerator)
        enough = run.outcome == "completed" and not run.mismatches and len(measured.result.steps) >= FEWEST_STEPS
        enough = enough and not drops_choices(run, measured.metrics.dropped if measured.metrics else None)
        if workload is not None and accelerator is not None and enough:
            same_work = replace(workload, shape=replace(workload.shape, source=None))
            runs.setdefault((same_work, accelerator.name, run.routing, _variant(run)), []).append(
                _Run(workload=workload, measured=measured, accelerator=accelerator)
            )
    samples, _ = probes_in(probes)
    memory, time, bare, foretold = [], [], [], []
    for (workload, *_), same in runs.items():
        first = same[0]
        group, name = _group(first), _name(first)
        for rates in dict.fromkeys(_rates_before(one.measured) for one in same):
            foretold += _foretold(group, name, rates, [one.measured for one in same if _rates_before(one.measured) == rates])
        memory += _memory_score(group, name, workload, [one.measured for one in same])
        seconds = [one.measured.metrics.step_seconds.value for one in same if one.measured.metrics]
        if not seconds:
            continue
        node = first.measured.result.run.machine.gpus_per_node or workload.layout.world_size
        score = Score(
            name=name,
            group=group,
            measured=median(seconds),
            predicted=predict_time(workload, rates_of(first.accelerator, node, samples)).step_seconds,
            layout=layout_name(workload),
            workload=_question(first),
        )
        time.append(score)
        bare.append(replace(score, predicted=predict_time(workload, published_rates(first.accelerator, node)).step_seconds))
    return Ledger(memory=tuple(memory), time=tuple(with_factors(time)), time_without_probes=tuple(bare), foretold=tuple(foretold))


def _rates_before(run: Measured) -> str | None:
    """Return where the rates came from by which a run was predicted before it started."""
    return run.result.run.prediction.rates if run.result.run.prediction else None


def _foretold(group: str, name: str, rates: str | None, runs: Sequence[Measured]) -> list[tuple[Score, Score]]:
    """Return memory and time that were predicted by some rates before like runs and measured in them, at their medians.

    Memory is what was reserved where a framework prints no other.
    """
    told = [
        (prediction, run.metrics)
        for run in runs
        if (prediction := run.result.run.prediction) is not None
        and prediction.step_seconds is not None
        and run.metrics is not None
        and (run.metrics.peak_memory_bytes or run.metrics.peak_reserved_bytes) is not None
    ]
    if not told:
        return []
    reserved = any(metrics.peak_memory_bytes is None for _, metrics in told)
    return [
        (
            Score(
                name=name,
                group=f"{group} (reserved)" if reserved else group,
                measured=median(
                    (metrics.peak_reserved_bytes if reserved else metrics.peak_memory_bytes) or 0 for _, metrics in told
                ),
                predicted=median(made.reserved_bytes if reserved else made.allocated_bytes for made, _ in told),
            ),
            Score(
                name=name,
                group=group,
                measured=median(metrics.step_seconds.value for _, metrics in told),
                predicted=median(prediction.step_seconds or 0.0 for prediction, _ in told),
                rates=rates,
            ),
        )
    ]


def _group(run: _Run) -> str:
    record, code = run.measured.result.run, run.workload.implementation
    mixtures = ", mixtures" if run.workload.shape.experts else ""
    return f"{run.accelerator.name}, {record.matmul_dtype}, {code.name}{mixtures}"


def _name(run: _Run) -> str:
    work, record = run.workload, run.measured.result.run
    again = "" if work.recompute.granularity == "none" else f" recompute {record.recompute_words}"
    narrow = "gradients" if record.engine_options.get("gradients") == "bf16" else None
    narrow = "states" if work.optimizer_states == "bf16" else narrow
    states = f" bf16 {narrow}" if narrow else ""
    states += " fp8 output layer" if work.implementation.fp8_output_layer and work.precision == "fp8" else ""
    states += " fully sharded" if work.implementation.divides_over_replicas_alone else ""
    off = [name for name, value in record.engine_options.items() if value is False and name in NAMED_SWITCHES]
    switched = f" without {', '.join(off)}" if off and work.implementation.name == "embedded" else ""
    shape = work.shape.name
    again += f" {record.routing} routing" if record.routing else ""
    again += _variant(record)
    return f"{shape} {layout_name(work)} MBS{work.micro_batch} s{work.sequence_tokens}{again}{states}{switched}"


def _variant(record: RunRecord) -> str:
    """Name what the prediction does not tell apart, and what has been tried in several ways; each begins with a comma."""
    attention = (record.evidence.attention if record.evidence else None) or ""
    attention = attention.removeprefix("torch ") if (record.context_parallel or 1) > 1 else ""
    overlap = "tp_comm_overlap" if record.engine_options.get("tp_comm_overlap") else ""
    graphs = "CUDA graphs" if ran_from_graphs(record) else ""
    limit, accelerator = record.machine.power_limit_watts, find_accelerator(record.machine.accelerator)
    lowered = f"{limit:.0f} W" if limit and accelerator and limit < accelerator.tdp_watts else ""
    kept = layers_in_bf16(record.evidence) if record.evidence else 0
    wide = f"{kept} of {record.shape.layers} layers in bf16" if kept and record.shape else ""
    theirs = record.evidence is not None and record.evidence.transformer_engine
    scaling = f"{scaled} scaling" if theirs and (scaled := TRAITS["fp8-scaling"].value(record)) else ""
    return "".join(f", {part}" for part in (attention, overlap, graphs, scaling, wide, lowered) if part)


NAMED_SWITCHES = {
    "streamed_cross_entropy",
    "compiled_regions",
    "fused_adam",
    "accumulate_weight_gradients",
    "balanced_stages",
    "distributed_optimizer",
}


def _question(run: _Run) -> str:
    work, group = run.workload, _group(run)
    whole = work.micro_batch * work.accumulation_steps * work.layout.data
    return f"{group}: {work.shape.name}, {plural(work.layout.world_size, 'GPU')}, {whole} x {work.sequence_tokens}"


def _memory_score(group: str, name: str, workload: Workload, same: Sequence[Measured]) -> list[Score]:
    """Return the score of the allocated peak; of the reserved one where a framework prints no other."""
    steps = [step for measured in same for step in measured.result.steps]
    allocated = [step.peak_allocated_bytes for step in steps if step.peak_allocated_bytes]
    reserved = [step.peak_reserved_bytes for step in steps if step.peak_reserved_bytes]
    prediction = predict_memory(workload)
    if not allocated and not reserved:
        return []
    return [
        Score(
            name=name,
            group=group if allocated else f"{group} (reserved)",
            measured=float(max(allocated or reserved)),
            predicted=prediction.allocated_bytes if allocated else prediction.reserved_bytes,
            others=other_estimates(workload),
            layout=layout_name(workload),
            workload=group,
        )
    ]


def other_estimates(workload: Workload) -> dict[str, float]:
    """Return the memory by other programs' formulas, as far as they answer."""
    found = {MEGATRON: megatron_estimate(workload), CALCULON: calculon_estimate(workload)}
    return {name: size for name, size in found.items() if size is not None}


# Rows of Megatron-LM's functional tests.


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows in the format of benchmarks/records/megatron-goldens/rows.jsonl.

    Raises:
        RecordError: the file cannot be read, or a line is not a row.
    """
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RecordError(f"Line {number} is not JSON.", where=f"{path}:{number}", why=str(error)) from error
        if not isinstance(row, dict) or not isinstance(row.get("options"), dict):
            raise RecordError(
                f"Line {number} is not a row.", where=f"{path}:{number}", why="A row has options.", fix="one object per line"
            )
        rows.append(row)
    return rows


def row_workload(row: Mapping[str, Any]) -> Workload:
    """Return the workload of a row; its case may add options that the row leaves out.

    Raises:
        RecordError: an option is missing or makes no sense.
    """
    case = str(row.get("case", ""))
    single = case.endswith("_1node") and row.get("machine") == "gb200"
    gpus = int(row.get("gpus") or (GPUS_OF_A_GB200_NODE if single else GPUS_OF_A_TEST))
    try:
        return workload_of_options({**options_left_out(case), **row["options"]}, gpus)
    except KeyError as error:
        raise RecordError(f"The row {case} cannot be predicted.", where=case, why=f"Its option {error} is missing.") from error
    except (TypeError, ValueError, ZeroDivisionError, ArithmeticError) as error:
        raise RecordError(f"The row {case} cannot be predicted.", where=case, why=f"{type(error).__name__}: {error}") from error


def predict_row(row: Mapping[str, Any]) -> tuple[int, float | None]:
    """Return the allocated peak of a row's last rank, and its step's seconds where the accelerator is known."""
    workload = row_workload(row)
    peak = predict_memory_of_last_stage(workload).allocated_bytes
    name = str(row.get("machine", ""))
    accelerator = find_accelerator(MACHINES.get(name, name))
    if accelerator is None or workload.precision not in accelerator.dense_flops:
        return peak, None
    node = min(GPUS_OF_A_TEST, workload.layout.world_size)
    return peak, predict_time(workload, published_rates(accelerator, node)).step_seconds


def score_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Score], list[Score], list[dict[str, Any]]]:
    """Return scores of memory and of time, and the rows with their predictions."""
    memory, time, answered = [], [], []
    for row in rows:
        try:
            peak, seconds = predict_row(row)
        except RecordError as error:
            answered.append({**row, "predicted_peak_bytes": None, "predicted_step_seconds": None, "error": str(error.why)})
            continue
        answered.append({**row, "predicted_peak_bytes": peak, "predicted_step_seconds": seconds})
        measured, step = row.get("peak_allocated_bytes"), row.get("median_step_seconds")
        name = f"{row.get('case')} on {row.get('machine')}, {row.get('environment')}"
        if measured and measured >= SMALL_BYTES:
            others = other_estimates(row_workload(row))
            group = "over 4 GB" if measured >= LARGE_BYTES else "1 to 4 GB"
            memory.append(Score(name=name, group=group, measured=float(measured), predicted=peak, others=others))
        if step and seconds is not None:
            large = parameters(row_workload(row).shape).total >= LARGE_MODEL
            group = LARGE_MODELS if large else "smaller models"
            time.append(Score(name=name, group=group, measured=float(step), predicted=seconds))
    return memory, time, answered
