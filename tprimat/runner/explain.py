"""Say where the throughput of a run went: its trace, its prediction by part, its waterfall, and what would help."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tprimat.analyze.compare import Ranking
from tprimat.analyze.groups import Measured
from tprimat.analyze.trace import WANTED, ProfileSummary, summarize
from tprimat.analyze.waterfall import REPEATED, ExpectedParts, LossName, Waterfall, waterfall
from tprimat.core import units
from tprimat.core.accelerators import Accelerator, find_accelerator
from tprimat.core.errors import MetricError, UserError
from tprimat.core.rows import DATA, document
from tprimat.core.workload import PRECISIONS, FullWorkload, graph_obstacle
from tprimat.engines import ENGINE_NAMES
from tprimat.engines.base import engine_named
from tprimat.predict.memory import predict_memory
from tprimat.predict.rates import Rates
from tprimat.predict.stages import ASSUMED, busiest_rank
from tprimat.predict.time import predict_time
from tprimat.records.discover import probes_in, read_result
from tprimat.records.schema import ProbeRecord, RunMetrics, RunRecord
from tprimat.records.store import from_json, read_bytes, read_trace, to_json, write_atomically
from tprimat.report.explain import Advice, Explanation, largest
from tprimat.report.words import not_counted_words
from tprimat.runner.planning import rates_of

SUMMARY_FILE = "trace.json"
"""In a run's folder, the summary of its trace once that was read: a thousand times smaller, so that it can replace it."""


def newest(measured: Sequence[Measured], place: Path) -> Measured:
    """Return the newest run that has metrics."""
    speeds = [one for one in measured if one.metrics is not None]
    if not speeds:
        why = next(map(not_counted_words, measured), None)
        raise MetricError("There is no step to explain.", where=str(place), why=why, fix="more steps, or --set warmup=0")
    return max(speeds, key=lambda one: one.result.run.started_at or "")


def explained(measured: Measured, probes: Sequence[ProbeRecord], trace: ProfileSummary | None = None) -> Explanation:
    """Return where the time of a run went, by the summary of its trace if there is one, and by probes of its accelerator."""
    if measured.metrics is None:
        raise MetricError("There is no step to explain.", where=str(measured.result.path), why=not_counted_words(measured))
    run = measured.result.run
    workload, rates = recorded_workload(run), _rates(run, probes)
    parts = waterfall(measured.result, measured.metrics, trace, _expected(run, workload, rates, measured.metrics.rank_load))
    explanation = Explanation(measured=measured, parts=parts, trace=trace, workload=workload, rates=rates)
    return replace(explanation, advice=_advice(explanation))


def fastest_explained(rankings: Sequence[Ranking], probes: Sequence[ProbeRecord]) -> list[Explanation]:
    """Return where the time of the fastest configuration of the first workloads went; of those without a peak nothing."""
    explanations = [explained(ranking.best.runs[0], probes) for ranking in rankings[:6]]  # more are too long to read
    return [one for one in explanations if one.parts.peak_flops]


def _rates(run: RunRecord, probes: Sequence[ProbeRecord]) -> Rates | None:
    """Return the rates of a run's accelerator; probes under another driver or power limit are of another machine."""
    accelerator = find_accelerator(run.machine.accelerator)
    if accelerator is None or run.ran.matmul_dtype not in accelerator.dense_flops:
        return None
    here = (run.machine.driver, run.machine.power_limit_watts)
    own = [probe for probe in probes if (probe.machine.driver, probe.machine.power_limit_watts) == here]
    rates = rates_of(accelerator, run.machine.gpus_per_node or 1, own or probes)
    return rates if own or not rates.measured else replace(rates, source=f"{rates.source} on another machine", measured=False)


def _expected(run: RunRecord, workload: FullWorkload | None, rates: Rates | None, load: float | None) -> ExpectedParts | None:
    """Predict a step by part, with experts as uneven as the busiest rank's load; or take what was predicted before the run."""
    if workload is None or rates is None:
        if run.prediction is None or not run.prediction.time:
            return None
        source = f"predicted before the run, by {run.prediction.rates}"
        return ExpectedParts(parts=run.prediction.time, known_by="predicted", source=source)
    even = replace(workload, routing="balanced" if workload.routing else None)
    kept = replace(even, recompute="none", recompute_modules=None, recompute_layers=None)
    whole, once = ({str(part): value for part, value in predict_time(work, rates).parts.items()} for work in (even, kept))
    uneven, surplus = predict_time(workload, rates).step_seconds - sum(whole.values()), busiest_rank(workload) - 1
    if load is not None and surplus:
        uneven *= ASSUMED["felt_share"] * (load - 1) / surplus
    return ExpectedParts(
        parts=whole | {part: once[part] for part in REPEATED} | {"uneven": uneven},
        again={part: whole[part] - once[part] for part in REPEATED},
        known_by="machine" if rates.measured else "predicted",
        source=rates.source,
    )


def lost_by(metrics: RunMetrics, folder: Path, probes: Sequence[Path]) -> Waterfall | None:
    """Return where the time of a run went that has just ended, without its trace, which takes long to read; None: not known."""
    with contextlib.suppress(UserError):
        measured = Measured(result=read_result(folder), metrics=metrics)
        return explained(measured, probes_in([folder, *probes])[0]).parts
    return None


def trace_of_run(run: RunRecord, place: Path) -> ProfileSummary | None:
    """Return the summary of the trace that a run left in its folder or its results folder, and keep it; None: it left none."""
    if run.machine.platform == "cpu":  # its traces hold no kernels
        return None
    if (place / SUMMARY_FILE).is_file():
        return from_json(ProfileSummary, read_bytes(place / SUMMARY_FILE), where=str(place / SUMMARY_FILE))
    output = place.parent.parent if place.is_dir() else place.parent
    file = next(iter(traces_of(output, run.run_id)), None)
    summary = summarize(read_trace(file, WANTED)) if file else None
    if summary is not None and place.is_dir():
        with contextlib.suppress(UserError):  # in a folder of others: it is read again next time
            write_atomically(place / SUMMARY_FILE, to_json(summary) + "\n")
    return summary


def traces_of(output: Path, run_id: str) -> tuple[Path, ...]:
    """Return the traces of a run: under the name for Chrome's viewer, else under the one for TensorBoard (train/profiler.py)."""
    named = sorted(output.glob(f"profile_*_{run_id}*.json"))
    return tuple(named or sorted((output / "profiler" / run_id).glob("rank_0.*.json")))


WORDS = document(DATA / "advice.yaml")
LOOKS: Mapping[str, str] = WORDS["advice"]
"""Where to look where no prediction helps, by part; and by the name of what a run could do."""
OBSTACLES: Mapping[str, str] = WORDS["obstacles"]
Losses = tuple[LossName, ...]
LEAST_GAIN, LEAST_OF_PART = 0.005, 0.05
"""What gains less of the tokens/s, or of what the part costs, is no advice."""


def _advice(explanation: Explanation) -> tuple[Advice, ...]:
    """Return what would make each of the largest parts smaller: what gains most by prediction and fits, else where to look."""
    run, work, rates = explanation.measured.result.run, explanation.workload, explanation.rates
    accelerator = find_accelerator(run.machine.accelerator)
    gains: list[tuple[bool, float, Losses, str]] = []
    without_graphs, waited_for_hosts = _why_no_graphs(run), 0.0
    read = [one.seconds for one in explanation.parts.losses if one.name == "host" and one.known_by == "run"]
    idle = read[0] / explanation.parts.step_seconds if read and explanation.trace is None else 1.0
    if work is not None and rates is not None and accelerator is not None:
        usual = predict_time(work, rates)
        waited = sum(max(0.0, one.seconds) for one in explanation.parts.losses if one.name in ("gaps", "host", "rest"))
        surplus = max(0.0, usual.parts["host"] - waited)  # what the GPU did not wait, no change can save
        waited_for_hosts = usual.parts["host"] / usual.step_seconds if work.world_size > 1 else 0.0
        now = usual.tokens_per_second_per_gpu * usual.step_seconds / (usual.step_seconds - surplus)
        for names, words, other in _changes(run, work, accelerator):
            gain = predict_time(other, rates).tokens_per_second_per_gpu / now - 1
            fit = predict_memory(other).fit(accelerator.usable_bytes)
            if fit != "does not fit" and gain > LEAST_GAIN:
                gains.append((fit == "fits", gain, names, words))
    advice = []
    on_cpu = run.machine.platform == "cpu"
    for loss in (one for one in largest(explanation.parts) if one.name != "rest" or on_cpu or work is not None):
        offered, remark = [one for one in gains if loss.name in one[2]], ""
        graphs = loss.name == "host" and without_graphs == ""  # which wait for no host, however late
        if graphs:
            offered = [one for one in offered if one[3] == LOOKS["graphs"]] or [(True, 0.0, (), LOOKS["graphs"])]
        fits, gain, _, words = max(offered, default=(True, 0.0, (), ""))
        least = max(LEAST_GAIN, LEAST_OF_PART * loss.seconds / explanation.parts.step_seconds)
        if gain < least and not graphs:
            look = "profile" if explanation.trace is None else "late" if loss.name == "host" else "kernels"
            held = (explanation.measured.metrics and explanation.measured.metrics.held_back) or {}
            capped = loss.name == "clock" and held.get("power cap", 0.0) > 0.5
            words = LOOKS.get("capped" if capped else loss.name, LOOKS["cpu" if on_cpu else look])
        if loss.name == "host" and without_graphs:
            remark = WORDS["no_graphs"].format(without_graphs)
        if loss.name == "rest" and waited_for_hosts > idle:
            remark = WORDS["waits"].format(units.percent(waited_for_hosts, 0))
        advice.append(Advice(name=loss.name, words=words, gain=gain if gain >= least else None, fits=fits, remark=remark))
    return tuple(advice)


def _changes(run: RunRecord, work: FullWorkload, accelerator: Accelerator) -> Iterator[tuple[Losses, str, FullWorkload]]:
    """Yield what could be done: the parts that it is meant for, the flags, and the workload that they make."""
    own_layers = engine_named(run.engine).implementation(work.shape, {**run.engine_options, "layers": "local"})
    is_te = run.engine_options.get("layers") == "transformer_engine" and work.matmul_dtype == "bf16"
    by_graphs = replace(work.code, launches_own_layers=False)
    keys = f"--set platform_optimizations.{accelerator.vendor.lower()}."
    micro, batch, data = work.micro_batch, work.global_batch_sequences, work.data_parallel
    larger: Losses = ("products", "tensor", "experts", "gaps", "host", "replicas")
    kept = {"recompute": "none", "recompute_modules": None, "recompute_layers": None}
    changes: list[tuple[Losses, str, dict[str, Any]]] = [
        (larger, f"--micro-batch-size {2 * micro}", {"micro_batch_sequences": 2 * micro}),
        (("bubble",), f"--micro-batch-size {micro // 2}", {"micro_batch_sequences": micro // 2}),
        (("replicas", "optimizer", "bubble"), f"--global-batch-size {2 * batch}", {"global_batch_sequences": 2 * batch}),
        (("recompute",), f"{keys}recompute=none", kept),
        (("memory", "host"), f"{keys}engine_options.layers=local", {"implementation": own_layers if is_te else 0}),
        (("products",), "--precision fp8", {"matmul_dtype": "fp8"}),
        (("host",), LOOKS["graphs"], {"implementation": by_graphs if _why_no_graphs(run) == "" else 0}),
        (("experts",), f"--set ep={work.expert_parallel // 2}", {"expert_parallel": work.expert_parallel // 2}),
    ]
    degrees: tuple[tuple[Losses, str, str], ...] = (
        (("tensor",), "--tp ", "tensor_parallel"),
        (("pipeline", "bubble"), "--pp ", "pipeline_parallel"),
        (("context",), "--set cp=", "context_parallel"),
    )
    for names, flag, field in degrees:
        half = getattr(work, field) // 2
        spread = {field: half, "data_parallel": 2 * data, "virtual_pipeline": None, "chunk_layers": None}
        changes.append((names, f"{flag}{half}", spread))
    for names, words, facts in changes:
        if all(value != 0 for value in facts.values()) and facts.get("matmul_dtype", "bf16") in accelerator.dense_flops:
            other = replace(work, **facts)
            if other.global_batch_sequences % (other.micro_batch * other.data_parallel) == 0:
                yield names, words, replace(other, sequence_parallel=other.tensor_parallel > 1)


def _why_no_graphs(run: RunRecord) -> str | None:
    """Return why the embedded engine cannot launch a run as CUDA graphs; empty: it could; None: it did, or another engine ran."""
    options = run.engine_options
    is_ours = "overlap_tensor_parallel" in options  # a switch of that engine alone
    if not is_ours or options.get("cuda_graphs") or run.machine.platform != "cuda" or run.ran.shape is None:
        return None
    own_layers = options.get("layers") == "local"
    obstacle = graph_obstacle(run.ran, fully_shard=options.get("fully_shard") is True, own_layers=own_layers)
    return OBSTACLES[obstacle] if obstacle else ""


def recorded_workload(run: RunRecord) -> FullWorkload | None:
    """Return the workload of a run that was measured; None where its record does not say all of it."""
    ran, dtype = run.ran, PRECISIONS.get(run.ran.matmul_dtype or "")
    needed = (ran.tensor_parallel, ran.pipeline_parallel, ran.accumulation_steps, ran.sequence_tokens, dtype)
    if run.engine not in ENGINE_NAMES or ran.shape is None or None in needed:
        return None
    te: bool | str | None = run.evidence.transformer_engine if run.evidence is not None else None
    te = te and run.software.get("transformer-engine", te)
    code = engine_named(run.engine).implementation(ran.shape, run.engine_options, te)
    if code is None:
        return None
    if ran.tensor_parallel == 1:  # a switch without effect must not tell two runs apart
        code = replace(code, overlaps_tensor_parallel=False, launches_own_layers=False)
    recorded = document(DATA / "traits.yaml")["as_it_ran"]
    facts = {name: value for name, value in ran.facts.items() if name in recorded}
    if ran.virtual_pipeline == 1:
        del facts["virtual_pipeline"]
    own: dict[str, Any] = {
        "matmul_dtype": dtype,
        "optimizer_states": "bf16" if run.engine_options.get("optimizer_states") == "bf16" else "fp32",
        "routing": ran.routing if ran.shape.experts else None,
        "expert_tensor_parallel": 1 if ran.shape.experts else None,
        "implementation": code,
    }
    return FullWorkload(**{"sequence_parallel": ran.tensor_parallel != 1, **facts, **own})
