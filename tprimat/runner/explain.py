"""Say where the throughput of a run went: its trace, its prediction by part, and its waterfall."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tprimat.analyze.groups import Measured
from tprimat.analyze.probes import setting_of
from tprimat.analyze.trace import ProfileSummary, summarise
from tprimat.analyze.waterfall import REPEATED, Expected, Waterfall, waterfall
from tprimat.core.accelerators import find_accelerator
from tprimat.core.errors import MetricError
from tprimat.core.workload import DEGREES, PRECISIONS, FullWorkload, Layout, Workload
from tprimat.engines import MODULES
from tprimat.engines.base import Settings, engine_named
from tprimat.predict.rates import Rates
from tprimat.predict.time import predict_time
from tprimat.records.schema import ProbeRecord, RunRecord
from tprimat.records.store import from_json, read_bytes
from tprimat.records.trace import read_document, trace_of
from tprimat.runner.planning import rates_of

SUMMARY_FILE = "trace.json"
"""Of a run whose trace was replaced by its summary, which is a thousand times smaller; in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A run, where its time went, and what its prediction depends on."""

    measured: Measured
    waterfall: Waterfall
    trace: ProfileSummary | None
    workload: FullWorkload | None
    """None: its record does not say all of it, or nothing predicts its engine."""
    rates: Rates | None


def explained(measured: Measured, probes: Sequence[ProbeRecord], *, traced: bool = True) -> Explained:
    """Return where the time of a run went; `traced`: by its trace, if it left one.

    Raises:
        MetricError: the run has no steady steps.
    """
    if measured.metrics is None:
        raise MetricError("There is nothing to explain.", where=str(measured.result.path), why=measured.not_counted)
    run = measured.result.run
    workload, rates = recorded_workload(run), _rates(run, probes)
    expected = _expected(run, workload, rates)
    trace = trace_of_run(measured.result.path, run.run_id) if traced else None
    parts = waterfall(measured.result, measured.metrics, trace, expected)
    return Explained(measured=measured, waterfall=parts, trace=trace, workload=workload, rates=rates)


def _rates(run: RunRecord, probes: Sequence[ProbeRecord]) -> Rates | None:
    """Return the rates of a run's accelerator; only probes under its driver and power limit are of its machine."""
    accelerator = find_accelerator(run.machine.accelerator)
    if accelerator is None or run.ran.matmul_dtype not in accelerator.dense_flops:
        return None
    here = replace(setting_of(run.machine, {}), accelerator=None)
    own = [probe for probe in probes if replace(setting_of(probe.machine, {}), accelerator=None) == here]
    return rates_of(accelerator, run.machine.gpus_per_node or 1, own)


def _expected(run: RunRecord, workload: FullWorkload | None, rates: Rates | None) -> Expected | None:
    """Predict a step by part; where the record does not say enough, take what was predicted before the run."""
    if workload is None or rates is None:
        if run.prediction is None or not run.prediction.time:
            return None
        source = f"predicted before the run, by {run.prediction.rates}"
        return Expected(parts=run.prediction.time, known_by="predicted", source=source)
    whole = predict_time(workload, rates).parts
    once = predict_time(replace(workload, recompute="none", recompute_modules=None, recompute_layers=None), rates).parts
    return Expected(
        parts=dict(whole) | {part: once[part] for part in REPEATED},  # type: ignore[index]
        again={part: whole[part] - once[part] for part in REPEATED},  # type: ignore[index]
        known_by="machine" if rates.measured else "predicted",
        source=rates.source,
    )


def trace_of_run(place: Path, run_id: str) -> ProfileSummary | None:
    """Return the summary of the trace that a run left, in its folder or in the folder of its results; None: it left none.

    Raises:
        RecordError: the trace is damaged.
        MetricError: it holds no kernel.
    """
    if (place / SUMMARY_FILE).is_file():
        return from_json(ProfileSummary, read_bytes(place / SUMMARY_FILE), where=str(place / SUMMARY_FILE))
    files = traces_of(place.parent.parent if place.is_dir() else place.parent, run_id)
    return summarise(trace_of(read_document(files[0]), files[0])) if files else None


def traces_of(output: Path, run_id: str) -> tuple[Path, ...]:
    """Return the traces of a run: under the name for Chrome's viewer, else under the one for TensorBoard (train/profiler.py)."""
    named = sorted(output.glob(f"profile_*_{run_id}*.json"))
    return tuple(named or sorted((output / "profiler" / run_id).glob("rank_0.*.json")))


# What a record says of its workload, in full.


def known_layout(ran: Workload) -> Layout | None:
    """Return how a model was split; None where TP, PP or DP is not known. Other degrees are 1 where nothing is said."""
    if None in (ran.tensor_parallel, ran.pipeline_parallel, ran.data_parallel):
        return None
    facts = {attribute: value for name, attribute in DEGREES.items() if (value := getattr(ran, name)) is not None}
    if facts.get("virtual_pipeline") == 1:
        del facts["virtual_pipeline"]
    return Layout(**{"sequence_parallel": (ran.tensor_parallel or 1) > 1, **facts})


def recorded_workload(run: RunRecord) -> FullWorkload | None:
    """Return the workload of a run that was measured; None where its record does not say all of it."""
    ran, layout = run.ran, known_layout(run.ran)
    if run.engine not in MODULES or ran.shape is None or layout is None or None in (ran.accumulation_steps, ran.sequence_tokens):
        return None
    te = run.evidence.transformer_engine if run.evidence is not None else None
    settings = Settings(shape=ran.shape, options=run.engine_options, transformer_engine=te)
    code = engine_named(run.engine).implementation(settings)
    dtype = PRECISIONS.get(ran.matmul_dtype or "")
    if code is None or dtype is None:
        return None
    if layout.tensor == 1:  # a switch without effect must not tell two runs apart
        code = replace(code, overlaps_tensor_parallel=False)
    return FullWorkload(
        **layout.facts,
        shape=ran.shape,
        micro_batch_sequences=ran.micro_batch_sequences,
        global_batch_sequences=ran.global_batch_sequences or 1,
        sequence_tokens=ran.sequence_tokens or 1,
        matmul_dtype=dtype,
        recompute=ran.recompute or "none",
        recompute_modules=ran.recompute_modules,
        recompute_layers=ran.recompute_layers,
        optimizer_states="bf16" if run.engine_options.get("optimizer_states") == "bf16" else "fp32",
        distributed_optimizer=ran.distributed_optimizer is not False,
        expert_tensor_parallel=1 if ran.shape.experts else None,
        implementation=code,
    )
