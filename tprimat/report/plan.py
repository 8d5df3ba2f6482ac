"""The answer to "which layout is fastest, and does it fit": a short text with the next command, and everything as a document."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tprimat.core import units
from tprimat.core.implementations import EMBEDDED, NEMO, Implementation
from tprimat.core.workload import FullWorkload, Layout
from tprimat.predict.memory import PARTS, Part
from tprimat.predict.rates import Rates
from tprimat.predict.search import Answer, Candidate, Question, reason
from tprimat.predict.time import TIME_PARTS, TimePart, late_step_seconds
from tprimat.report.plan_flags import flags_of, measuring_flags
from tprimat.report.tables import Painted, Screen, columns, plural

SHOWN = 3
"""Layouts of a short answer."""
MOST_TOO_LARGE = 4
MOST_REFUSALS = 3
TIME_ERROR = {True: 0.15, False: 0.2}
"""Measured by probes or not -> relative error that nine in ten predictions of dense models stay within (docs/planning.md)."""
FASTER_BY = {True: 0.07, False: 0.05}
"""Measured by probes or not -> relative lead over the prediction that no step exceeded, rounded up (docs/planning.md)."""
MEASURED_ON = frozenset({"H100 SXM", "H200 SXM"})
"""Accelerators whose steps in benchmarks/records gave that error."""
MEMORY_ERROR = 0.05
"""Relative error that nearly all predictions of memory stay within (docs/planning.md)."""
TIGHT = (
    f"† Under {units.percent(MEMORY_ERROR, 0)} of the memory is left, which is the error of the prediction. "
    "If it runs out: a smaller micro-batch or more recomputation."
)
SLOW_HOST = "‡ The lower end assumes a host as slow at launching kernels as that of two H100."
MEMORY_NAMES: Mapping[Part, str] = {part: "backward pass" if part == "backward" else part for part in PARTS}
TIME_NAMES: Mapping[TimePart, str] = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "norms and elementwise",
    "tensor": "TP communication",
    "context": "CP communication",
    "experts": "EP communication",
    "pipeline": "PP communication",
    "bubble": "pipeline bubble",
    "replicas": "DP communication",
    "optimizer": "optimizer",
    "host": "host launches",
}
UNSHARDED = "Fully sharded layouts (FSDP, HSDP) over several nodes are not considered."


def layout_name(workload: FullWorkload) -> str:
    """Name a layout: 'TP4 PP2 VPP2 CP2 EP8 DP4'; degrees of 1 are left out, except those of DP."""
    layout = workload.layout
    degrees = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline or 1,
        "CP": layout.context,
        "EP": layout.expert,
    }
    return " ".join([*(f"{name}{degree}" for name, degree in degrees.items() if degree > 1), f"DP{layout.data}"])


def is_tight(candidate: Candidate, question: Question) -> bool:
    """Return whether a candidate leaves less memory than its prediction may be off by."""
    return candidate.memory.device_bytes > question.memory_bytes * (1 - MEMORY_ERROR)


def marked_layout(candidate: Candidate, question: Question) -> str:
    """Name a candidate's layout, with the mark that TIGHT explains."""
    return layout_name(candidate.workload) + (" †" if is_tight(candidate, question) else "")


def engine_name(implementation: Implementation) -> str:
    """Name what runs a layout: the embedded engine as --engine does, another as its layers are known."""
    return "engine megatron" if implementation.name == EMBEDDED.name else implementation.name


def steps_measured(rates: Rates, gpus: int) -> bool:
    """Return whether steps on such GPUs, of one node and not joined by PCIe, were compared with their predictions."""
    return rates.accelerator in MEASURED_ON and gpus <= rates.gpus_per_node


def time_error(work: FullWorkload, rates: Rates) -> float | None:
    """Return the relative error that nine in ten steps stayed within (docs/planning.md); None where that is not known.

    Steps took longer with NeMo on Transformer Engine. Of mixtures of experts only those of the embedded engine in bf16, predicted
    from probes, stayed within it. On several nodes and on other accelerators, none was measured.
    """
    if not steps_measured(rates, work.world_size):
        return None
    if work.shape.experts:
        stayed = rates.measured and work.code.name == EMBEDDED.name and work.matmul_dtype == "bf16"
    else:
        stayed = work.code.name != NEMO.name
    return TIME_ERROR[rates.measured] if stayed else None


def error_of(question: Question, rates: Rates) -> float | None:
    """Return the relative error of predictions that answer a question; None where that is not known."""
    return time_error(replace(question.work, **Layout(data=question.gpus).facts), rates)


def interval(candidate: Candidate, rates: Rates) -> tuple[float, float | None, float | None]:
    """Return tokens/s/GPU, and the ends of its interval; None: that is not known.

    They are those of the published errors of such predictions, or below them what a late host leaves.
    """
    assert candidate.time is not None
    value, error = candidate.time.tokens_per_second_per_gpu, time_error(candidate.workload, rates)
    if error is None:
        return value, None, None
    return value, min(value * (1 - error), _late_rate(candidate)), value * (1 + FASTER_BY[rates.measured])


def host_may_be_late(candidate: Candidate, rates: Rates) -> bool:
    """Whether a late host, and not the error of the prediction, is the lower end of a candidate's interval."""
    error = time_error(candidate.workload, rates)
    if error is None or candidate.time is None:
        return False
    return _late_rate(candidate) < candidate.time.tokens_per_second_per_gpu * (1 - error)


def _late_rate(candidate: Candidate) -> float:
    """Return tokens/s/GPU if the host is as late as it once was; infinite where that is not known."""
    work, late = candidate.workload, late_step_seconds(candidate.workload)
    return work.tokens_per_step / late / work.world_size if late else math.inf


def rate_of(candidate: Candidate, rates: Rates) -> str:
    """Format tokens/s/GPU with the interval, and with the mark that SLOW_HOST explains."""
    value, low, high = interval(candidate, rates)
    ends = "" if low is None or high is None else f" [{units.count(low)}, {units.count(high)}]"
    return f"{units.count(value)}{ends}" + (" ‡" if host_may_be_late(candidate, rates) else "")


def how_sure(question: Question, rates: Rates) -> str:
    """Say what predictions that answer a question come from, and how good they are."""
    error = error_of(question, rates)
    if error is not None:
        proof = f"nine in ten such steps whose host kept up were within {units.percent(error, 0)}"
    else:
        why = "such steps took longer" if steps_measured(rates, question.gpus) else "no such step was measured"
        proof = f"{why}, so no interval is given"
    return f"Predicted from {rates.source}; {proof}"


def text(
    rated: tuple[Answer, Rates],
    screen: Screen,
    enough: Candidate | None = None,
    command: str | None = None,
    *,
    whole: bool = False,
) -> str:
    """Format the answer for a terminal.

    Args:
        rated: all layouts, and what they were predicted from.
        screen: where it is shown.
        enough: where nothing fits, a layout on the fewest GPUs that are enough.
        command: what runs the model with its options, to which the flags of a layout are added; None where nothing does.
        whole: every layout, and the parts of the fastest one.
    """
    answer, rates = rated
    question, layouts = answer.question, answer.layouts()
    parts = [_question(question, rates, screen), screen.prose(f"{how_sure(question, rates)} (docs/planning.md).")]
    if layouts:
        shown = layouts if whole else layouts[:SHOWN]
        parts.append(_table(shown, question, rates, screen))
        parts.append("\n".join(_next(rated, len(shown), screen, command)))
    else:
        parts.append(screen.prose(f"Nothing fits {units.gibibytes(question.memory_bytes)} a GPU.", meaning="refused"))
        parts += [screen.prose(_enough(enough, question))] if enough else []
    if whole and layouts:
        parts.append(_bars(layouts[0], screen))
    if (nearly := answer.nearly()) and (whole or not layouts):
        parts.append(_too_large(nearly, question, screen))
    if answer.refused and (whole or not layouts):
        refused = "; ".join(reason.removesuffix(".") for reason in answer.refused[:MOST_REFUSALS])
        parts.append(screen.prose(f"Left out, because the engine refuses them: {refused}."))
    return "\n\n".join(parts)


def _question(question: Question, rates: Rates, screen: Screen) -> str:
    nodes, asked = question.gpus // question.gpus_per_node, question.work
    where = plural(question.gpus, "GPU") + (f" in {nodes} nodes" if nodes > 1 else "")
    work = f"{asked.global_batch_sequences:,} x {asked.sequence_tokens:,} tokens a step, {asked.matmul_dtype}"
    device = f"{rates.accelerator}, {units.gibibytes(question.memory_bytes)} each"
    about = f"{asked.shape.name} on {where} ({device}): {work}, {engine_name(asked.code)}"
    return screen.prose(about, meaning="heading")


def _next(rated: tuple[Answer, Rates], shown: int, screen: Screen, command: str | None) -> list[str]:
    """Return lines below the table: what it leaves out and its marks mean, whether to measure, and the commands."""
    rates, question, layouts = rated[1], rated[0].question, rated[0].layouts()
    error, best = error_of(question, rates), layouts[0]
    lines = [f"{plural(len(layouts) - shown, 'more layout')}: tprimat plan --all"] if len(layouts) > shown else []
    lines += [UNSHARDED] if question.gpus > question.gpus_per_node else []
    lines += [screen.prose(TIGHT)] if any(is_tight(one, question) for one in layouts[:shown]) else []
    lines += [screen.prose(SLOW_HOST)] if any(host_may_be_late(one, rates) for one in layouts[:shown]) else []
    if command is None or question.engine is None:
        return [*lines, "TPrimat does not start such a run; the degrees are for Megatron-LM's own flags."]
    lines.append(f"run the fastest:   {command} {flags_of(best.workload, question, rates)}")
    close = sum(error is None or best_share(candidate, best) > 1 / (1 + error) for candidate in layouts)
    if close > 1:
        known = "How far these rates may be off is not known"
        within = f"{close} of {len(layouts)} layouts are within the prediction's error of the fastest"
        lines.append(screen.prose(f"{known if error is None else within}: measure to rank them"))
        lines.append(f"measure the best:  {command} {measuring_flags(question, rates)}")
    return lines


def _enough(enough: Candidate, question: Question) -> str:
    work = enough.workload
    other = "" if work.code == question.work.code else f", with {work.code.name}"
    return f"{plural(work.world_size, 'GPU')} are enough: {_how(enough)}{other}."


def _how(candidate: Candidate) -> str:
    work = candidate.workload
    how = f"{layout_name(work)}, micro-batch {work.micro_batch}, recompute {work.recompute_words}"
    return f"{how}, {units.gibibytes(candidate.memory.device_bytes)} a GPU"


def _table(layouts: Sequence[Candidate], question: Question, rates: Rates, screen: Screen) -> str:
    best, rows = layouts[0], []
    for candidate in layouts:
        work, behind = candidate.workload, units.percent(1 - best_share(candidate, best), 0)
        again = plural(work.recompute_layers, "layer") if work.recompute_layers else work.recompute
        name = marked_layout(candidate, question)
        rows.append(
            [
                Painted(name, "winner") if candidate is best else name,
                "fastest" if candidate is best else reason(candidate, best),
                str(work.micro_batch),
                "" if again == "none" else again,
                rate_of(candidate, rates),
                "" if candidate is best else f"-{behind}",
                units.gibibytes(candidate.memory.device_bytes),
            ]
        )
    header = ["layout", "why slower", "micro", "recompute", "tokens/s/GPU", "vs fastest", "memory"]
    unused = [] if any(row[3] for row in rows) else ["recompute"]
    kept = [place for place, name in enumerate(header) if name not in unused]
    header, *rows = ([row[place] for place in kept] for row in (header, *rows))
    return columns(header, rows, left=2, screen=screen, drop=["recompute", "micro", "vs fastest"])


def best_share(candidate: Candidate, best: Candidate) -> float:
    """Return the throughput of a candidate over that of the best."""
    assert candidate.time is not None
    assert best.time is not None
    return best.time.step_seconds / candidate.time.step_seconds


def _bars(best: Candidate, screen: Screen) -> str:
    assert best.time is not None
    need = best.memory
    beside = {
        "room for fragments": need.device_bytes - need.outside_bytes - need.allocated_bytes,
        "driver and kernels": need.outside_bytes,
    }
    parts = {MEMORY_NAMES[part]: value for part, value in need.parts.items()}
    memory = _shares({**parts, **beside}, units.gibibytes)
    time = _shares({TIME_NAMES[part]: value for part, value in best.time.parts.items()}, lambda value: units.si(value, "s"))
    moment = f"memory    {memory}; at its peak in the {need.moment}"
    return "\n".join(screen.prose(line, 10) for line in (moment, f"step      {time}"))


def _shares(parts: Mapping[str, float], show: Callable[[float], str]) -> str:
    whole = sum(parts.values())
    large = sorted(((value, name) for name, value in parts.items() if value >= 0.01 * whole), reverse=True)
    return ", ".join(f"{name} {show(value)}" for value, name in large)


def _too_large(nearly: Sequence[Candidate], question: Question, screen: Screen) -> str:
    lines = [f"too large for {units.gibibytes(question.memory_bytes)} with any micro-batch and recomputation:"]
    for candidate in nearly[:MOST_TOO_LARGE]:
        parts = candidate.memory.parts
        most = MEMORY_NAMES[max(parts, key=lambda part: parts[part])]
        missing = units.gibibytes(candidate.missing_bytes)
        lines.append(f"  {layout_name(candidate.workload)}: {missing} missing, most of it {most}")
    more = len(nearly) - MOST_TOO_LARGE
    lines += [f"  and {plural(more, 'more layout')}"] if more > 0 else []
    return "\n".join(screen.prose(line, 4) for line in lines)


def document(answer: Answer, rates: Rates) -> dict[str, Any]:
    """Return everything in SI units."""
    question = answer.question
    return {
        "question": {
            "model": question.work.shape.name,
            "accelerator": rates.accelerator,
            "gpus": question.gpus,
            "gpus_per_node": question.gpus_per_node,
            "memory_bytes": question.memory_bytes,
            "global_batch_sequences": question.work.global_batch_sequences,
            "sequence_tokens": question.work.sequence_tokens,
            "precision": question.work.matmul_dtype,
            "implementation": question.work.code.name,
        },
        "rates": {"source": rates.source, "measured": rates.measured, "relative_error": error_of(question, rates)},
        "fitting": [_row(candidate, answer, rates) for candidate in answer.fitting],
        "too_large": [_row(candidate, answer, rates) for candidate in answer.too_large],
        "refused": list(answer.refused),
    }


def _row(candidate: Candidate, answer: Answer, rates: Rates) -> dict[str, Any]:
    work, time = candidate.workload, candidate.time
    layout = work.layout
    row: dict[str, Any] = {
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "virtual_pipeline": layout.virtual_pipeline,
        "context_parallel": layout.context,
        "expert_parallel": layout.expert,
        "data_parallel": layout.data,
        "micro_batch_sequences": work.micro_batch,
        "recompute": work.recompute,
        "recompute_layers": work.recompute_layers,
        "memory": {part: value for part, value in candidate.memory.parts.items() if value},
        "allocated_bytes": candidate.memory.allocated_bytes,
        "reserved_bytes": candidate.memory.reserved_bytes,
        "device_bytes": candidate.memory.device_bytes,
        "missing_bytes": candidate.missing_bytes,
    }
    if time is not None:
        value, low, high = interval(candidate, rates)
        row |= {
            "step_seconds": time.step_seconds,
            "time": {part: time.parts[part] for part in TIME_PARTS if time.parts[part]},
            "tokens_per_second_per_gpu": value,
            "low": low,
            "high": high,
            "low_with_slow_host": host_may_be_late(candidate, rates),
            "why_not": reason(candidate, answer.fitting[0]),
        }
    return row
