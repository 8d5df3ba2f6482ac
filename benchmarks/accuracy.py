#!/usr/bin/env python3
"""Compare predictions of memory and time with what was measured, and write the tables of benchmarks/results/accuracy.md.

python3 benchmarks/accuracy.py
python3 benchmarks/accuracy.py --check                      only report differences
python3 benchmarks/accuracy.py --rows rows.jsonl --json     rows of Megatron-LM's tests come back with their predictions

A factor is never fitted on what it is judged by: each configuration is predicted with the factor of the others in its group.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from page import page_parser, replace_blocks, update_page  # noqa: E402

from benchmarks.calibration_fit import Sample, fitted, left_out, margins_of, measured_on, several_nodes, spreads_of, text_of  # noqa: E402
from benchmarks.megatron_options import options_left_out, workload_of_options  # noqa: E402
from benchmarks.other_estimators import calculon_estimate, megatron_estimate  # noqa: E402
from benchmarks.published_scores import PublishedScore, guess_of, guesses, real, result_of, score_published  # noqa: E402
from tprimat.analyze.groups import Measured  # noqa: E402
from tprimat.analyze.metrics import MetricOptions, drops_choices  # noqa: E402
from tprimat.analyze.traits import TRAITS  # noqa: E402
from tprimat.core import units  # noqa: E402
from tprimat.core.accelerators import Accelerator, find_accelerator  # noqa: E402
from tprimat.core.errors import RecordError, UserError  # noqa: E402
from tprimat.core.flops import parameters  # noqa: E402
from tprimat.core.rows import document  # noqa: E402
from tprimat.core.workload import FullWorkload  # noqa: E402
from tprimat.predict import predict  # noqa: E402
from tprimat.predict.calibration import Expected, expected, figures, kinds_of, memory_kinds_of, traits_of  # noqa: E402
from tprimat.predict.memory import MemoryPrediction, predict_memory  # noqa: E402
from tprimat.predict.time import predict_time  # noqa: E402
from tprimat.records.discover import probes_in  # noqa: E402
from tprimat.records.evidence import captures_layers  # noqa: E402
from tprimat.records.schema import RunRecord  # noqa: E402
from tprimat.records.store import read_bytes  # noqa: E402
from tprimat.report.plan import layout_name  # noqa: E402
from tprimat.report.tables import plural, table  # noqa: E402
from tprimat.runner.analysis import read_results  # noqa: E402
from tprimat.runner.explain import recorded_workload  # noqa: E402
from tprimat.runner.planning import rates_of  # noqa: E402

CALIBRATION = ROOT / "tprimat" / "data" / "calibration.yaml"
PAGE = ROOT / "benchmarks" / "results" / "accuracy.md"
RECORDS = ROOT / "benchmarks" / "records"
MACHINES = (RECORDS / "h200", RECORDS / "h100")
PROBES = [folder for machine in MACHINES for folder in sorted(machine.glob("probes-*"))]
FOLDERS = [
    folder
    for machine in MACHINES
    for folder in sorted(machine.iterdir())
    if folder.is_dir() and folder.name != "unswitched" and folder not in PROBES
]
"""Of our records: not those whose sources were changed in ways that no record tells."""
GOLDENS = RECORDS / "megatron-goldens" / "rows.jsonl"
UNTOUCHED = {"": RECORDS / "published" / "rows.jsonl", " (one operator)": RECORDS / "published" / "operator.jsonl"}
"""What the groups are called after -> published results that calibrate nothing."""
NOTEWORTHY = 0.1
"""Errors of rows that the page lists one by one."""


FEWEST_STEPS = 5
GPUS_OF_A_TEST = 8
GPUS_OF_A_GB200_NODE = 4
MACHINES = {"a100": "A100 SXM 80GB", "h100": "H100 SXM", "gb200": "GB200"}
"""As rows of Megatron-LM's tests call them -> name in the table."""
LARGE_BYTES, SMALL_BYTES = 4e9, 1e9
LARGE_MODEL, LARGE_MODELS = 5e9, "5 billion parameters and more"
CALCULON, MEGATRON = "calculon", "Megatron-LM's estimator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(PublishedScore):
    """One configuration: what was measured, and what was predicted before looking."""

    group: str
    """What errors are summed up over."""
    fitted: float | None = None
    """Predicted times the factor of the group's other configurations; None: there are no others, or a factor makes no sense."""
    others: Mapping[str, float] | None = None
    """Other estimator -> its prediction."""
    layout: str = ""
    workload: str = ""
    """Rows of one workload differ in their layouts only."""
    rates: str | None = None
    """Where the rates of a step's prediction came from; None: unknown, or memory."""

    @property
    def fitted_error(self) -> float | None:
        """The relative error, signed, after the factor."""
        return None if self.fitted is None else self.fitted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of several rows."""

    rows: int
    mean_absolute: float
    worst: float
    """Signed."""
    bias: float
    """Mean of the signed errors."""
    within_5: float
    """Share of the rows."""
    within_8: float
    within_10: float


def errors(values: Iterable[float]) -> Errors | None:
    """Sum up relative errors; None where there are none."""
    signed = list(values)
    if not signed:
        return None
    sizes = [abs(value) for value in signed]
    return Errors(
        rows=len(signed),
        mean_absolute=fmean(sizes),
        worst=max(signed, key=abs),
        bias=fmean(signed),
        within_5=_share(sizes, 0.05),
        within_8=_share(sizes, 0.08),
        within_10=_share(sizes, 0.10),
    )


def _share(sizes: Sequence[float], limit: float) -> float:
    return sum(size <= limit for size in sizes) / len(sizes)


def factor(scores: Sequence[Score]) -> float | None:
    """Return the factor that best turns predictions into measurements: the geometric mean of their ratios."""
    if not scores:
        return None
    return math.exp(fmean(math.log(score.measured / score.predicted) for score in scores))


def with_factors(scores: Sequence[Score]) -> list[Score]:
    """Return the scores with each fitted by the factor of the other configurations of its group."""
    fitted = []
    for score in scores:
        scale = factor([other for other in scores if other.group == score.group and other.name != score.name])
        fitted.append(replace(score, fitted=None if scale is None else score.predicted * scale))
    return fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A workload that was measured in several layouts: which the predictions would have chosen."""

    workload: str
    chosen: Score
    best: Score
    layouts: int

    @property
    def loss(self) -> float:
        """How much longer the chosen layout's step takes than the best's, as a share."""
        return self.chosen.measured / self.best.measured - 1


def choices(scores: Sequence[Score], least: int = 3) -> list[Choice]:
    """Return the choice in each workload that was measured in at least so many layouts."""
    chosen_layouts = []
    for workload in dict.fromkeys(score.workload for score in scores):
        rows = [score for score in scores if score.workload == workload]
        if len(rows) >= least:
            chosen = min(rows, key=lambda score: score.predicted)
            best = min(rows, key=lambda score: score.measured)
            chosen_layouts.append(Choice(workload=workload, chosen=chosen, best=best, layouts=len(rows)))
    return chosen_layouts


# Our records.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All scores."""

    memory: tuple[Score, ...] = ()
    time: tuple[Score, ...] = ()
    """Of our records, with probes where there are some."""
    foretold: tuple[tuple[Score, Score], ...] = ()
    """Memory and time of our records as they were predicted before each run, by the version of that day."""
    time_without_probes: tuple[Score, ...] = ()
    samples: tuple[Sample, ...] = ()
    """Steps of our records and their predictions from published rates, for the calibration."""
    reserved: tuple[tuple[tuple[str, ...], float], ...] = ()
    """Kinds of each run, and what it reserved over what was predicted to be allocated, less 1."""
    probed: tuple[Sample, ...] = ()
    """The same from probes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    workload: FullWorkload
    measured: Measured
    accelerator: Accelerator


def score_records(paths: Sequence[Path], probes: Sequence[Path]) -> Ledger:
    """Score the results in some folders."""
    return score_runs(read_results(paths, MetricOptions(), {}).measured, probes)


def score_runs(results: Sequence[Measured], probes: Sequence[Path]) -> Ledger:
    """Score some runs: each configuration on each accelerator once, at the median of its runs.

    Those that drop choices of experts are left out.
    """
    runs: dict[tuple[FullWorkload, str, str | None, str], list[_Run]] = {}
    for measured in results:
        run, workload = measured.result.run, recorded_workload(measured.result.run)
        accelerator = find_accelerator(run.machine.accelerator)
        enough = run.outcome == "completed" and not run.mismatches and len(measured.result.steps) >= FEWEST_STEPS
        enough = enough and not drops_choices(run, measured.metrics.dropped if measured.metrics else None)
        if workload is not None and accelerator is not None and enough:
            same_work = replace(workload, shape=replace(workload.shape, source=None))
            runs.setdefault((same_work, accelerator.name, run.ran.routing, _variant(run)), []).append(
                _Run(workload=workload, measured=measured, accelerator=accelerator)
            )
    samples, _ = probes_in(probes)
    memory, time, bare, foretold, samples_of, reserved = [], [], [], [], [], []
    for (workload, *_), same in runs.items():
        first = same[0]
        group, name = _group(first), _name(first)
        for rates in dict.fromkeys(_rates_before(one.measured) for one in same):
            foretold += _foretold(group, name, rates, [one.measured for one in same if _rates_before(one.measured) == rates])
        memory += _memory_score(group, name, workload, [one.measured for one in same])
        need = predict_memory(workload).allocated_bytes
        peaks = [max((step.peak_reserved_bytes or 0 for step in one.measured.result.steps), default=0) for one in same]
        reserved += [(memory_kinds_of(workload), peak / need - 1) for peak in peaks if peak]
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
        bare.append(replace(score, predicted=predict(workload, first.accelerator, node).time.step_seconds))
        samples_of.append(
            Sample(
                name=f"{group}: {name}",
                source=f"records of {first.accelerator.name}, {workload.code.name}",
                subject=f"{group}: {name}",
                accelerator=first.accelerator.name,
                traits=traits_of(workload, first.accelerator, node),
                kinds=kinds_of(workload, first.accelerator),
                measured=score.measured,
                predicted=score.predicted,
            )
        )
    return Ledger(
        memory=tuple(memory),
        time=tuple(with_factors(time)),
        time_without_probes=tuple(bare),
        foretold=tuple(foretold),
        samples=tuple(replace(one, predicted=score.predicted) for one, score in zip(samples_of, bare, strict=True)),
        probed=tuple(samples_of),
        reserved=tuple(reserved),
    )


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
    record, code = run.measured.result.run, run.workload.code
    mixtures = ", mixtures" if run.workload.shape.experts else ""
    return f"{run.accelerator.name}, {record.ran.matmul_dtype}, {code.name}{mixtures}"


def _name(run: _Run) -> str:
    work, record = run.workload, run.measured.result.run
    again = "" if work.recompute == "none" else f" recompute {record.ran.recompute_words}"
    narrow = "gradients" if record.engine_options.get("gradients") == "bf16" else None
    narrow = "states" if work.optimizer_states == "bf16" else narrow
    states = f" bf16 {narrow}" if narrow else ""
    states += " fp8 output layer" if work.code.fp8_output_layer and work.matmul_dtype == "fp8" else ""
    states += " fully sharded" if work.code.divides_over_replicas_alone else ""
    off = [name for name, value in record.engine_options.items() if value is False and name in NAMED_SWITCHES]
    switched = f" without {', '.join(off)}" if off and work.code.name == "embedded" else ""
    shape = work.shape.name
    again += f" {record.ran.routing} routing" if record.ran.routing else ""
    again += _variant(record)
    return f"{shape} {layout_name(work)} MBS{work.micro_batch} s{work.sequence_tokens}{again}{states}{switched}"


def _variant(record: RunRecord) -> str:
    """Name what the prediction does not tell apart, and what has been tried in several ways; each begins with a comma."""
    attention = record.ran.attention or ""
    attention = attention.removeprefix("torch ") if (record.ran.context_parallel or 1) > 1 else ""
    overlap = "tp_comm_overlap" if record.engine_options.get("tp_comm_overlap") else ""
    graphs = "CUDA graphs" if captures_layers(record.engine_options) else ""
    limit, accelerator = record.machine.power_limit_watts, find_accelerator(record.machine.accelerator)
    lowered = f"{limit:.0f} W" if limit and accelerator and limit < accelerator.tdp_watts else ""
    kept = record.ran.layers_in_bf16 or 0
    wide = f"{kept} of {record.ran.shape.layers} layers in bf16" if kept and record.ran.shape else ""
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
    whole = work.micro_batch * work.accumulation * work.layout.data
    return f"{group}: {work.shape.name}, {plural(work.layout.world_size, 'GPU')}, {whole} x {work.sequence_tokens}"


def _memory_score(group: str, name: str, workload: FullWorkload, same: Sequence[Measured]) -> list[Score]:
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


def other_estimates(workload: FullWorkload) -> dict[str, float]:
    """Return the memory by other programs' formulas, as far as they answer."""
    estimates = {MEGATRON: megatron_estimate(workload), CALCULON: calculon_estimate(workload)}
    return {name: size for name, size in estimates.items() if size is not None}


# Rows of Megatron-LM's functional tests.


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows in the format of benchmarks/records/megatron-goldens/rows.jsonl, or published results (published_scores.py).

    Raises:
        RecordError: the file cannot be read, or a line is not a row.
    """
    rows = []
    for number, line in enumerate(read_bytes(path).decode().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except ValueError as error:
            raise RecordError(f"Line {number} is not JSON.", where=f"{path}:{number}", why=str(error)) from error
        if not isinstance(row, dict) or not (isinstance(row.get("options"), dict) or "model" in row):
            why = "A row of Megatron-LM's tests has options, a published result a model."
            raise RecordError(f"Line {number} is not a row.", where=f"{path}:{number}", why=why, fix="one object per line")
        rows.append(row)
    return rows


def row_workload(row: Mapping[str, Any]) -> FullWorkload:
    """Return the workload of a row; its case may add options that the row leaves out.

    Raises:
        RecordError: an option is missing or makes no sense.
    """
    case = str(row.get("case", ""))
    single = case.endswith("_1node") and row.get("machine") == "gb200"
    gpus = row.get("gpus") or row.get("world_size") or (GPUS_OF_A_GB200_NODE if single else None)
    try:
        return workload_of_options({**options_left_out(case), **row["options"]}, None if gpus is None else int(gpus))
    except KeyError as error:
        raise RecordError(f"The row {case} cannot be predicted.", where=case, why=f"Its option {error} is missing.") from error
    except (TypeError, ValueError, ZeroDivisionError, ArithmeticError) as error:
        raise RecordError(f"The row {case} cannot be predicted.", where=case, why=f"{type(error).__name__}: {error}") from error


ANSWERS = (
    *("predicted_peak_bytes", "predicted_device_bytes", "predicted_step_seconds", "predicted_tokens_per_second_per_gpu"),
    *("interval", "step_interval", "kind"),
)
"""Keys that an answered row has besides its own, all null where it cannot be predicted; interval is of tokens/s/GPU."""


def predict_row(row: Mapping[str, Any]) -> tuple[int, float | None, dict[str, Any]]:
    """Return the allocated peak of a row's last rank, its step's seconds where the accelerator is known, and its answers."""
    workload = row_workload(row)
    memory = predict_memory(workload, last_stage=True)
    name = str(row.get("machine", ""))
    accelerator = find_accelerator(MACHINES.get(name, name))
    if accelerator is None or workload.matmul_dtype not in accelerator.dense_flops:
        return memory.allocated_bytes, None, _answers(memory, None, None)
    node = min(GPUS_OF_A_TEST, workload.layout.world_size)
    seconds = predict(workload, accelerator, node).time.step_seconds
    return memory.allocated_bytes, seconds, _answers(memory, workload, expected(workload, accelerator, node).of(seconds))


def predict_published_row(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the answers for a published result.

    Raises:
        RecordError: it cannot be predicted; `why` says why.
    """
    guess = guess_of(result_of(row, number))
    answers = _answers(guess.prediction.memory, guess.workload, guess.expected())
    assumed = {
        "micro_batch": guess.workload.micro_batch,
        "recompute": guess.workload.recompute_words,
        "routing": guess.workload.routing,
    }
    sharded, work = guess.workload.code.shards_weights, guess.workload
    dense = "dense, sharded" if sharded else f"dense, {work.format}"
    group = f"experts, {work.routing}" if work.shape.experts else dense
    return {**answers, "assumed": {**assumed, "fully_sharded": sharded}, "fits": guess.fits, "group": group}


def _answers(memory: MemoryPrediction, work: FullWorkload | None, step: Expected | None) -> dict[str, Any]:
    answers: dict[str, Any] = dict.fromkeys(ANSWERS)
    answers |= {"predicted_peak_bytes": memory.allocated_bytes, "predicted_device_bytes": memory.device_bytes}
    if work is None or step is None:
        return answers
    tokens = work.tokens_per_step / work.world_size
    return answers | {
        "predicted_step_seconds": step.step_seconds,
        "predicted_tokens_per_second_per_gpu": tokens / step.step_seconds,
        "interval": [tokens / step.high, tokens / step.low],
        "step_interval": [step.low, step.high],
        "kind": step.kind,
    }


def score_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Score], list[Score], list[dict[str, Any]]]:
    """Return scores of memory and of time, and the rows with their predictions."""
    memory, time, answered = [], [], []
    for number, row in enumerate(rows, start=1):
        try:
            if "options" not in row:
                answers = predict_published_row(row, number)
                answered.append({**row, **answers})
                if printed := real(row.get("tokens_per_second_per_gpu")):
                    rate, name = answers["predicted_tokens_per_second_per_gpu"], str(row.get("model"))
                    time.append(Score(name=name, group=answers["group"], measured=1 / printed, predicted=1 / rate))
                continue
            peak, seconds, answers = predict_row(row)
        except (UserError, TypeError, ValueError, ArithmeticError, LookupError) as error:  # others' rows may hold anything
            why = getattr(error, "why", None) or f"{type(error).__name__}: {error}"
            answered.append({**row, **dict.fromkeys(ANSWERS), "error": str(why)})
            continue
        answered.append({**row, **answers})
        measured, step = real(row.get("peak_allocated_bytes")), real(row.get("median_step_seconds"))
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


# The tables.

ERROR_HEADER = ["rows", "mean error", "worst", "bias", "within 5 %", "within 10 %"]


def memory_table(scores: Sequence[Score]) -> str:
    """Return the errors of predicted memory by group, with other estimators' mean errors on the same rows."""
    names = list(dict.fromkeys(name for score in scores for name in score.others or {}))
    rows = []
    for group in _groups(scores):
        mine = _of(scores, group)
        rows.append([group, *_cells(errors(score.error for score in mine)), *(_other(mine, name) for name in names)])
    if len(rows) > 1:
        rows.append(["all", *_cells(errors(score.error for score in scores)), *(_other(scores, name) for name in names)])
    return table(["group", *ERROR_HEADER, *names], rows)


def _other(scores: Sequence[Score], name: str) -> str:
    other = _errors_of_other(scores, name)
    if other is None:
        return units.ABSENT
    covered = "" if other.rows == len(scores) else f" ({other.rows} rows)"
    return f"{units.percent(other.mean_absolute, 1)}{covered}"


def _errors_of_other(scores: Sequence[Score], name: str) -> Errors | None:
    return errors(score.others[name] / score.measured - 1 for score in scores if score.others and name in score.others)


def time_table(scores: Sequence[Score]) -> str:
    """Return the errors of predicted steps by group: raw, and with each group's factor, leaving the configuration out."""
    rows = []
    for group in _groups(scores):
        mine = _of(scores, group)
        scale = factor(mine)
        fitted = errors(score.fitted_error for score in mine if score.fitted_error is not None)
        rows.append([group, "raw", units.ABSENT, *_cells(errors(score.error for score in mine))])
        if fitted is not None and scale is not None:
            rows.append(["", "one factor", f"{scale:.3f}", *_cells(fitted)])
    return table(["group", "prediction", "factor", *ERROR_HEADER], rows, left=2)


def error_table(scores: Sequence[Score]) -> str:
    """Return the errors by group."""
    return table(
        ["group", *ERROR_HEADER], [[group, *_cells(errors(s.error for s in _of(scores, group)))] for group in _groups(scores)]
    )


def memory_rows(scores: Sequence[Score]) -> str:
    """Return each configuration's memory."""
    rows = [[score.name, score.group, *_figures(score, units.gibibytes)] for score in scores]
    return table(["configuration", "group", "measured", "predicted", "error"], rows, left=2)


def time_rows(scores: Sequence[Score]) -> str:
    """Return each configuration's step."""
    rows = [
        [score.name, score.group, *_figures(score, lambda value: units.si(value, "s")), units.signed_percent(score.fitted_error)]
        for score in scores
    ]
    return table(["configuration", "group", "measured", "predicted", "raw error", "with factor"], rows, left=2)


def foretold_rows(scores: Sequence[tuple[Score, Score]]) -> str:
    """Return memory and step of each configuration beside what was predicted before it ran."""
    rows = [
        [
            memory.name,
            memory.group,
            units.gibibytes(memory.measured),
            units.signed_percent(memory.error),
            units.si(time.measured, "s"),
            units.signed_percent(time.error),
            (time.rates or units.ABSENT).split(" of ")[0],
        ]
        for memory, time in scores
    ]
    return table(["configuration", "group", "memory", "error", "step", "error", "step predicted from"], rows, left=2)


def rate_rows(scores: Sequence[Score]) -> str:
    """Return published throughput and what is predicted for it; scores are seconds of a token on one GPU."""
    rows = [[score.name, *_figures(score, lambda seconds: units.count(1 / seconds))] for score in scores]
    return table(["published result", "tokens/s/GPU", "predicted", "error of the step"], rows)


def worst_rows(scores: Sequence[Score], least: float, show: Callable[[float], str] = units.gibibytes) -> str:
    """Return the rows whose error is at least so large, worst first; equal rows of a case once."""
    worst = sorted((score for score in scores if abs(score.error) >= least), key=lambda score: -abs(score.error))
    return table(["row", "measured", "predicted", "error"], [[score.name, *_figures(score, show)] for score in worst])


def _figures(score: Score, show: Callable[[float], str]) -> list[str]:
    return [show(score.measured), show(score.predicted), units.signed_percent(score.error)]


def choice_table(scores: Sequence[Score]) -> str:
    """Return what the predictions would have chosen in each workload with three or more measured layouts."""
    rows = [
        [choice.workload, str(choice.layouts), _plain(choice.chosen), _plain(choice.best), units.percent(choice.loss, 1)]
        for choice in choices(scores)
    ]
    return table(["workload", "layouts", "predicted fastest", "measured fastest", "slower by"], rows)


def _plain(score: Score) -> str:
    return score.name.partition(" ")[2]


def _groups(scores: Iterable[Score]) -> list[str]:
    return list(dict.fromkeys(score.group for score in scores))


def _of(scores: Iterable[Score], group: str) -> list[Score]:
    return [score for score in scores if score.group == group]


def _cells(summed: Errors | None) -> list[str]:
    if summed is None:
        return [units.ABSENT] * len(ERROR_HEADER)
    return [
        str(summed.rows),
        units.percent(summed.mean_absolute, 1),
        units.signed_percent(summed.worst),
        units.signed_percent(summed.bias),
        units.percent(summed.within_5, 0),
        units.percent(summed.within_10, 0),
    ]


def summary_document(groups: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    """Return the errors of several sets of scores by group, raw and fitted, with other estimators' beside them."""
    return {name: {group: _group_document(_of(scores, group)) for group in _groups(scores)} for name, scores in groups.items()}


def _group_document(scores: Sequence[Score]) -> dict[str, Any]:
    raw = errors(score.error for score in scores)
    fitted = errors(score.fitted_error for score in scores if score.fitted_error is not None)
    summary: dict[str, Any] = {"raw": None if raw is None else asdict(raw)}
    if fitted is not None:
        summary |= {"factor": factor(scores), "fitted": asdict(fitted)}
    for name in dict.fromkeys(name for score in scores for name in score.others or {}):
        other = _errors_of_other(scores, name)
        summary[name] = None if other is None else asdict(other)
    return summary


# The page.


@cache
def ledger() -> Ledger:
    """Return the scores of our own records."""
    return score_records(FOLDERS, PROBES)


@cache
def golden_scores() -> tuple[list[Score], list[Score]]:
    """Return memory and time of Megatron-LM's tests."""
    memory, time, _ = score_rows(read_rows(GOLDENS))
    return memory, time


def large_goldens() -> list[Score]:
    """Return the rows over 4 GB."""
    return [score for score in golden_scores()[0] if score.group == "over 4 GB"]


def large_models() -> list[Score]:
    """Return the steps of models that keep a GPU busy."""
    return [score for score in golden_scores()[1] if score.group == LARGE_MODELS]


def headline() -> str:
    """Return the result in one paragraph."""
    scores, golden = ledger(), large_goldens()
    memory = errors(score.error for score in scores.memory)
    large = errors(score.error for score in golden)
    assert memory is not None
    assert large is not None
    percent = units.percent
    return (
        f"Memory is predicted with a mean error of {percent(memory.mean_absolute, 1)} on {memory.rows} configurations on H200 "
        f"and H100, {percent(memory.within_5, 0)} of them within 5 %,\n"
        f"and of {percent(large.mean_absolute, 1)} on {large.rows} rows of Megatron-LM's tests that allocate over 4 GB.\n"
    )


UNSURE = ("torchtune", "TPrimat peak throughput guide")
"""Engines and sources whose rows calibrate nothing: torchtune counts tokens that carry loss; in the guide's rows another dtype
ran than it prints."""


@cache
def published_samples() -> tuple[Sample, ...]:
    """Return the published steps of one token and GPU, and their predictions."""
    return tuple(
        Sample(
            name=result.name,
            source=result.source,
            subject=f"{result.shape} on {result.accelerator}",
            accelerator=guess.accelerator.name,
            traits=guess.traits,
            kinds=kinds_of(guess.workload, guess.accelerator),
            measured=1 / measured,
            predicted=1 / guess.prediction.time.tokens_per_second_per_gpu,
        )
        for result, measured, guess in guesses()
        if not {result.engine, result.source} & set(UNSURE)
    )


def calibrations() -> dict[str, dict[str, Any]]:
    """Return the content of calibration.yaml, fitted anew."""
    samples = {"published": [*published_samples(), *ledger().samples], "probes": ledger().probed}
    parts = {name: fitted(some) for name, some in samples.items()}
    return {
        **parts,
        "memory": {"margins": margins_of(ledger().reserved)},
        "measured_on": {name: measured_on(some, parts[name]["errors"]) for name, some in samples.items()},
        "several_nodes": {name: several_nodes(some, parts[name]["errors"]) for name, some in samples.items()},
    }


def calibrated_table() -> str:
    """Return the errors on published steps by kind: as predicted, and as effects and intervals of other sources have them."""
    samples = published_samples()
    every = [*samples, *ledger().samples]
    errors_of = left_out(every)
    spreads = {source: spreads_of(every, errors_of, without=source) for source in {sample.source for sample in samples}}
    rows = []
    for kind in sorted({kind for sample in samples for kind in sample.kinds if kind.count(",") < 2}):
        mine = [sample for sample in samples if kind in sample.kinds]
        corrected = [math.expm1(-errors_of[sample.name]) for sample in mine]
        widths = [next(spreads[one.source][name][0] for name in one.kinds if name in spreads[one.source]) for one in mine]
        held = [abs(errors_of[one.name]) <= width for one, width in zip(mine, widths, strict=True)]
        cells = [*_cells(errors(corrected))[1:4], units.percent(sum(held) / len(held), 0)]
        raw = errors(sample.predicted / sample.measured - 1 for sample in mine)
        rows.append([kind, *_cells(raw)[:2], *cells])
    return table(["kind", "rows", "as predicted", "corrected", "worst", "bias", "within interval"], rows)


def untouched_table() -> str:
    """Return the errors on published steps that calibrate nothing."""
    rows = []
    for whose, path in UNTOUCHED.items():
        _, time, answered = score_rows(read_rows(path))
        for group in sorted(_groups(time)):
            mine = [row for row in answered if row.get("group") == group and row.get("tokens_per_second_per_gpu")]
            held = sum(row["interval"][0] <= row["tokens_per_second_per_gpu"] <= row["interval"][1] for row in mine)
            refused = sum(not row["fits"] for row in mine)
            cells = _cells(errors(score.error for score in _of(time, group)))
            rows.append([f"{group}{whose}", *cells, units.percent(held / len(mine), 0), str(refused)])
    return table(["group", *ERROR_HEADER, "within interval", "said not to fit"], rows)


BLOCKS = {
    "headline": headline,
    "foretold": lambda: foretold_rows(ledger().foretold),
    "memory": lambda: memory_table(ledger().memory),
    "memory_rows": lambda: memory_rows(ledger().memory),
    "time": lambda: time_table(ledger().time),
    "time_rows": lambda: time_rows(ledger().time),
    "time_published": lambda: error_table(ledger().time_without_probes),
    "goldens": lambda: memory_table(golden_scores()[0]),
    "goldens_worst": lambda: worst_rows(large_goldens(), NOTEWORTHY),
    "goldens_time": lambda: error_table(golden_scores()[1]),
    "goldens_time_rows": lambda: worst_rows(large_models(), 0, units.seconds),
    "calibrated": calibrated_table,
    "untouched": untouched_table,
    "published": lambda: rate_rows(score_published()),
    "choices": lambda: choice_table(ledger().time),
}


def scored_rows(files: Sequence[Path]) -> dict[str, Any]:
    """Return the rows of some files with their predictions, and the errors by group."""
    memory, time, rows = score_rows(row for file in files for row in read_rows(file))
    return {"groups": summary_document({"rows_memory": memory, "rows_time": time}), "rows": rows}


def main() -> int:
    """Write the page, or check it; or answer rows."""
    parser = page_parser(__doc__)
    parser.add_argument("--rows", type=Path, action="append", metavar="FILE.jsonl", help="rows to predict; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the rows and their errors as one JSON document")
    parser.add_argument("--calibrate", action="store_true", help=f"write {CALIBRATION.relative_to(ROOT)}, then the page")
    options = parser.parse_args()
    if options.calibrate:
        CALIBRATION.write_text(text_of(calibrations()), encoding="utf8")
        document.cache_clear()
        figures.cache_clear()
    if options.rows:
        scored = scored_rows(options.rows)
        if options.json:
            print(json.dumps(scored, indent=2, allow_nan=False))
        else:
            for row in scored["rows"]:
                print(json.dumps(row))
        return 0
    text = replace_blocks(PAGE.read_text(encoding="utf8"), "figures", lambda name: f"\n{BLOCKS[name]().rstrip()}\n\n")
    return update_page(PAGE, text, check=options.check, command="python3 benchmarks/accuracy.py")


if __name__ == "__main__":
    sys.exit(main())
