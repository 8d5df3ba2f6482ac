"""The answer to "which layout is fastest, and does it fit": one screen of text, and everything as a document."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tprimat.core import units
from tprimat.core.accelerators import find_accelerator, peak_dense_flops
from tprimat.core.flops import flop_per_token
from tprimat.core.implementations import EMBEDDED, NEMO, Implementation
from tprimat.core.published import rebase, results
from tprimat.core.workload import FullWorkload, Layout
from tprimat.predict.memory import PARTS, MemoryPrediction, Part
from tprimat.predict.published import published_errors, published_like
from tprimat.predict.rates import Rates
from tprimat.predict.search import Answer, Candidate, Question, reason
from tprimat.predict.time import TIME_PARTS, TimePart, late_step_seconds
from tprimat.report.limits import AS_GRAPHS
from tprimat.report.plan_flags import ON_EACH_NODE, can_run_as_graphs, flags_of, measuring_flags
from tprimat.report.screen import PLAIN, Painted, Screen
from tprimat.report.tables import columns, plural

MOST_ROWS = 12
MOST_TOO_LARGE = 4
MOST_REFUSALS = 3
MOST_PUBLISHED = 2
TIME_ERROR = {True: 0.15, False: 0.2}
"""Measured by probes or not -> relative error that nine in ten predictions of dense models stay within (docs/planning.md)."""
FASTER_BY = {True: 0.07, False: 0.05}
"""Measured by probes or not -> relative lead over the prediction that no step exceeded, rounded up (docs/planning.md)."""
MEASURED_ON = frozenset({"H100 SXM", "H200 SXM"})
"""Accelerators whose steps in benchmarks/records gave that error."""
MEMORY_ERROR = 0.05
"""Relative error that nearly all predictions of memory stay within (docs/planning.md)."""
OFF = units.percent(MEMORY_ERROR, 0)
"""The same, as text."""
TIGHT = (
    f"† Less than {OFF} of the memory is left, and its prediction may be {OFF} off; if it runs out, recompute more, take a "
    "smaller micro-batch, or divide the model further."
)
"""Explains the mark of layouts in tables."""
SLOW_HOST = "Intervals that reach down further assume a host as slow at launching kernels as that of two H100 (docs/planning.md)."
"""Explains intervals in tables."""
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


def over_pcie(rates: Rates, gpus: int) -> bool:
    """Return whether a data sheet predicts exchanges over PCIe, of which no step was measured."""
    accelerator = find_accelerator(rates.accelerator)
    return gpus > 1 and not rates.measured and accelerator is not None and accelerator.joined_by_pcie


def steps_measured(rates: Rates, gpus: int) -> bool:
    """Return whether steps on such GPUs, of one node, were compared with their predictions."""
    return rates.accelerator in MEASURED_ON and gpus <= rates.gpus_per_node and not over_pcie(rates, gpus)


def time_error(work: FullWorkload, rates: Rates) -> float | None:
    """Return the relative error that nine in ten steps stayed within (docs/planning.md); None where that is not known.

    Steps took longer with NeMo on Transformer Engine. Of mixtures of experts only those of the embedded engine in bf16, predicted
    from probes, stayed within it. Over PCIe, on several nodes and on other accelerators, none was measured.
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


def _rate(candidate: Candidate, rates: Rates) -> str:
    value, low, high = interval(candidate, rates)
    ends = "" if low is None or high is None else f" [{units.count(low)}, {units.count(high)}]"
    return f"{units.count(value)}{ends}"


def text(
    answer: Answer, rates: Rates, screen: Screen = PLAIN, enough: Candidate | None = None, command: str | None = None
) -> str:
    """Format the answer for a terminal.

    Args:
        answer: all layouts.
        rates: what they were predicted from.
        screen: where it is shown.
        enough: where nothing fits, a layout on the fewest GPUs that are enough.
        command: what runs the model with its options, to which the flags of a layout are added; None where nothing does.
    """
    layouts, question = answer.layouts(), answer.question
    parts = [_question(question, rates, screen), _rates(question, rates, screen)]
    if layouts:
        parts.append(_best(answer, rates, screen, command))
        parts.append(f"{_table(layouts, screen)}\n{_certainty(layouts, question, rates, screen, command)}")
        parts.append(_bars(layouts[0], screen))
    else:
        parts.append(screen.prose(f"Nothing fits {units.gibibytes(answer.question.memory_bytes)} a GPU.", meaning="refused"))
        parts += [screen.prose(_enough(enough, question))] if enough else []
    if answer.refused:
        parts.append(screen.prose(f"Left out, because the engine refuses them: {_refusals(answer.refused)}."))
    if nearly := answer.nearly():
        parts.append(_too_large(nearly, answer.question, screen))
    return "\n\n".join(parts)


def _question(question: Question, rates: Rates, screen: Screen) -> str:
    nodes, asked = question.gpus // question.gpus_per_node, question.work
    where = plural(question.gpus, "GPU") + (f" in {nodes} nodes" if nodes > 1 else "")
    work = f"{asked.global_batch_sequences:,} x {asked.sequence_tokens:,} tokens a step, {asked.matmul_dtype}"
    about = f"{asked.shape.name} on {where} ({rates.accelerator}): {work}, {engine_name(asked.code)}"
    return screen.prose(about, meaning="heading")


def _rates(question: Question, rates: Rates, screen: Screen) -> str:
    error = error_of(question, rates)
    hint = "" if rates.measured else "; probes of the machine (tprimat probe) would be more precise"
    kind = "mixtures of experts" if question.work.shape.experts else "dense models"
    kinds = f"dense models and {kind}" if question.work.shape.experts else kind
    if over_pcie(rates, question.gpus):
        proof = "No step was measured on GPUs that PCIe joins, whose exchanges depend on the host; no interval is given"
    elif not steps_measured(rates, question.gpus):
        several = "several nodes of " if rates.accelerator in MEASURED_ON else ""
        within = _published_within(question, rates, kind)
        proof = f"We measured no step on {several}{rates.accelerator}, so no interval is given{within}"
    elif error is None:
        steps = f"{kind}, {question.work.matmul_dtype}, {engine_name(question.work.code)}"
        proof = f"On H200, such steps ({steps}) took longer; no interval is given"
    else:
        proof = (
            f"On up to 4 H200 and on H100, nine in ten steps of {kinds} whose host kept up were within "
            f"{units.percent(error, 0)} of the prediction"
        )
    said = [f"Predicted from {rates.source}{hint}. {proof} (docs/planning.md)."]
    same = published_of_model(question, rates)
    return screen.prose(" ".join([*said, *([f"Others published of this model there: {same}."] if same else [])]))


def published_of_model(question: Question, rates: Rates) -> str:
    """Return what others published of the model on the accelerator in the dtype, beside what is predicted of those runs."""
    found = published_like(question.work.shape.name, rates.accelerator, question.work.matmul_dtype)
    nearest = sorted(found, key=lambda pair: abs(math.log((pair[0].gpus or 1) / question.gpus)))[:MOST_PUBLISHED]
    return "; ".join(
        f"{units.count(1 / score.measured)} tokens/s/GPU on {plural(result.gpus or 1, 'GPU')}, where "
        f"{units.count(1 / score.predicted)} are predicted"
        for result, score in nearest
    )


def _published_within(question: Question, rates: Rates, kind: str) -> str:
    """Return how far the prediction is from what others published on the accelerator, rounded up; nothing where they did not."""
    accelerator = find_accelerator(rates.accelerator)
    several = question.gpus > rates.gpus_per_node
    experts = bool(question.work.shape.experts)
    errors = published_errors(accelerator, experts=experts, several_nodes=several) if accelerator else ()
    if not errors:
        return ""
    within = units.percent(math.ceil(100 * max(map(abs, errors))) / 100, 0)
    were, there = "was" if len(errors) == 1 else "were", "there" if several else "on it"
    every = "all " if len(errors) > 1 else ""
    how = f", {every}slower" if max(errors) < 0 else f", {every}faster" if min(errors) > 0 else ""
    return f"; {plural(len(errors), 'published result')} of {kind} {there} {were} within {within} of the prediction{how}"


def _best(answer: Answer, rates: Rates, screen: Screen, command: str | None) -> str:
    best, question = answer.fitting[0], answer.question
    work = best.workload
    rate = f"{_rate(best, rates)} tokens/s/GPU"
    memory = f"{units.gibibytes(best.memory.device_bytes)} of {units.gibibytes(question.memory_bytes)}"
    again = "" if work.recompute == "none" else f", recompute {work.recompute_words}"
    name = screen.paint(layout_name(work), "winner")
    what = f"fastest   {name}, micro-batch {work.micro_batch}{again}"
    lines = [what, f"{rate}, {memory} a GPU"]
    if question.engine is None:
        lines.append("TPrimat does not start this engine; the degrees are for its own flags")
    else:
        flags = flags_of(work, question, rates)
        lines.append(f"{command} {flags}" if command else flags)
        lines += [ON_EACH_NODE] if question.gpus > question.gpus_per_node else []
    if host_may_be_late(best, rates):
        lines.append("the lower end assumes a host as slow at launching kernels as that of two H100 (docs/planning.md)")
        if can_run_as_graphs(work):
            lines[-1] += ";"
            lines.append(f"this launches each micro-batch with one call: --set {AS_GRAPHS}")
    if is_tight(best, question):
        left = units.percent(1 - best.memory.device_bytes / question.memory_bytes, 0)
        lines.append(f"{left} of the memory is left, and its prediction may be {OFF} off;")
        lines.append(_if_it_runs_out(work, question))
        lines += _with_room(answer, rates, command)
    return f"\n{' ' * 10}".join(lines)


def _with_room(answer: Answer, rates: Rates, command: str | None) -> list[str]:
    """Return the fastest layout that leaves more memory than its prediction may be off by, with its command."""
    best, question = answer.fitting[0], answer.question
    found = next((one for one in answer.fitting if not is_tight(one, question)), None)
    if found is None:
        return []
    rate = f"{_rate(found, rates)} tokens/s/GPU ({units.signed_percent(best_share(found, best) - 1)})"
    flags = [f"{command} {flags_of(found.workload, question, rates)}"] if command and question.engine else []
    return [f"with {OFF} to spare: {_how(found)}, {rate}", *flags]


def _if_it_runs_out(work: FullWorkload, question: Question) -> str:
    if work.micro_batch == 1:
        return "if it runs out, recompute more or divide the model further"
    return "if it runs out, recompute more or take a smaller micro-batch"


def _certainty(layouts: Sequence[Candidate], question: Question, rates: Rates, screen: Screen, command: str | None) -> str:
    """Say how many layouts the prediction cannot tell from the fastest, and how to rank them."""
    error = error_of(question, rates)
    if len(layouts) == 1:
        return "No other layout that these options allow fits."
    run = f":\n  {command} {measuring_flags(question, rates)}" if command and question.engine else ""
    if error is None:
        return screen.prose("How far these rates may be off is not known: measure to rank the layouts") + run
    close = sum(best_share(candidate, layouts[0]) > 1 / (1 + error) for candidate in layouts)
    if close == 1:
        late = "; with a slow host another may be faster" if host_may_be_late(layouts[0], rates) else ""
        within = f"No other layout is within {units.percent(error, 0)} of the fastest, the error of the prediction{late}."
        return screen.prose(within)
    return (
        screen.prose(f"{close} of {len(layouts)} layouts are within the prediction's error of the fastest: measure to rank them")
        + run
    )


def _refusals(reasons: Sequence[str]) -> str:
    """Join reasons, naming a switch that forbids several things once ("cuda_graphs is on, and ..., or ...")."""
    found: dict[str, list[str]] = {}
    for what in reasons:
        switch, _, why = what.removesuffix(".").partition(", and ")
        found.setdefault(switch, []).append(why)
    named = [f"{switch}, and {', or '.join(whys)}" if any(whys) else switch for switch, whys in found.items()]
    more = len(named) - MOST_REFUSALS
    return "; ".join(named[:MOST_REFUSALS]) + (f"; and {more} more reasons" if more > 0 else "")


def _enough(enough: Candidate, question: Question) -> str:
    work = enough.workload
    other = "" if work.code == question.work.code else f", with {work.code.name}"
    return f"{plural(work.world_size, 'GPU')} are enough, the fewest of the powers of two: {_how(enough)}{other}."


def _how(candidate: Candidate) -> str:
    work = candidate.workload
    how = f"{layout_name(work)}, micro-batch {work.micro_batch}, recompute {work.recompute_words}"
    return f"{how}, {units.gibibytes(candidate.memory.device_bytes)} a GPU"


def scaling_text(
    answers: Sequence[tuple[Answer, Rates]],
    screen: Screen = PLAIN,
    enough: Candidate | None = None,
) -> str:
    """Format what several numbers of GPUs give, an answer each, with published results of the same model."""
    (first, rates), *_ = answers
    question = first.question
    kind = _scaling_kind([answer.question for answer, _ in answers])
    work = f"{question.work.sequence_tokens:,} tokens each, {question.work.matmul_dtype}, {engine_name(question.work.code)}"
    title = f"{question.work.shape.name} ({rates.accelerator}): {kind}, {work}"
    found = [(answer.fitting[0], answer.question) for answer, _ in answers if answer.fitting]
    rows = [_scaling_row(answer, own, found[0][0] if found else None) for answer, own in answers]
    header = ["GPUs", "sequences", "fastest layout", "recompute", "tokens/s/GPU", "MFU", "efficiency", "step", "memory"]
    unused = [3] if not any(row[3] for row in rows) else []
    header, *rows = [[cell for place, cell in enumerate(row) if place not in unused] for row in (header, *rows)]
    shown = columns(header, rows, left=0, screen=screen, drop=["step", "sequences", "memory", "recompute"])
    notes = [screen.prose(TIGHT)] if any(is_tight(*one) for one in found) else []
    notes += [screen.prose(SLOW_HOST)] if any(host_may_be_late(candidate, rates) for candidate, _ in found) else []
    notes += [screen.prose(_enough(enough, question))] if enough else []
    about = _rates(answers[-1][0].question, rates, screen)
    parts = [screen.prose(title, meaning="heading"), about, shown, *notes]
    return "\n\n".join([*parts, *_published(question, rates, screen)])


def _scaling_row(answer: Answer, rates: Rates, first: Candidate | None) -> list[str]:
    """Return the cells of an answer; its efficiency is relative to `first`, the first layout of the table."""
    asked = [f"{answer.question.gpus:,}", f"{answer.question.work.global_batch_sequences:,}"]
    if first is None or not answer.fitting:
        return [*asked, "nothing fits", "", *[units.ABSENT] * 5]
    best = answer.fitting[0]
    assert best.time is not None
    assert first.time is not None
    efficiency = best.time.tokens_per_second_per_gpu / first.time.tokens_per_second_per_gpu
    return [
        *asked,
        marked_layout(best, answer.question),
        _recompute_cell(best.workload),
        _rate(best, rates),
        units.percent(mfu(best, rates), 0),
        units.percent(efficiency, 0),
        units.si(best.time.step_seconds, "s"),
        units.gibibytes(best.memory.device_bytes),
    ]


def _scaling_kind(questions: Sequence[Question]) -> str:
    batches = [question.work.global_batch_sequences for question in questions]
    if len(set(batches)) == 1:
        return f"strong scaling, {batches[0]:,} sequences"
    if len({question.work.global_batch_sequences / question.gpus for question in questions}) == 1:
        return "weak scaling, the batch grows with the GPUs"
    return f"{min(batches):,} to {max(batches):,} sequences"


def mfu(candidate: Candidate, rates: Rates) -> float | None:
    """Return the share of the dense peak that model FLOP reach, counted causal."""
    peak = peak_dense_flops(rates.accelerator, candidate.workload.matmul_dtype)
    if peak is None or candidate.time is None:
        return None
    work = candidate.workload
    return candidate.time.tokens_per_second_per_gpu * flop_per_token(work.shape, work.sequence_tokens, "causal") / peak


def _published(question: Question, rates: Rates, screen: Screen) -> list[str]:
    """Return what others reached with this model on this accelerator: as they print it, and counted as in a plan."""
    found = [
        (result, rebase(result).mfu)
        for result in results()
        if result.shape == question.work.shape.name
        and result.gpus
        and (device := find_accelerator(result.accelerator)) is not None
        and device.name == rates.accelerator
    ]
    rows = [
        [
            result.source,
            f"{result.gpus:,}",
            result.workload.matmul_dtype or units.ABSENT,
            units.percent(result.mfu, 0),
            units.percent(as_here, 0),
        ]
        for result, as_here in sorted(found, key=lambda one: one[0].gpus or 0)
        if (result.mfu or as_here) and (as_here or 0.0) < 1  # more than the peak cannot hold
    ]
    header = ["source", "GPUs", "dtype", "MFU printed", "MFU as above"]
    shown = columns(header, rows, screen=screen, drop=["dtype", "MFU printed"])
    about = "Published, each with its own batch and layout. MFU as above is counted from tokens/s, over the dense peak."
    return [screen.prose(about), shown] if rows else []


def _table(layouts: Sequence[Candidate], screen: Screen) -> str:
    best = layouts[0]
    rows = []
    for candidate in layouts[:MOST_ROWS]:
        assert candidate.time is not None
        name = layout_name(candidate.workload)
        rows.append(
            [
                Painted(name, "winner") if candidate is best else name,
                "fastest" if candidate is best else reason(candidate, best),
                str(candidate.workload.micro_batch),
                _recompute_cell(candidate.workload),
                units.count(candidate.time.tokens_per_second_per_gpu),
                _vs_fastest(candidate, best),
                units.gibibytes(candidate.memory.device_bytes),
            ]
        )
    header = ["layout", "why slower", "micro", "recompute", "tokens/s/GPU", "vs fastest", "memory"]
    shown = columns(header, rows, left=2, screen=screen, drop=["recompute", "micro"])
    more = len(layouts) - len(rows)
    fit = "fits" if more == 1 else "fit"
    return shown + (f"\n{plural(more, 'more layout')} {fit}; --json has all of them" if more > 0 else "")


def _recompute_cell(workload: FullWorkload) -> str:
    if workload.recompute_layers:
        return plural(workload.recompute_layers, "layer")
    return "" if workload.recompute == "none" else workload.recompute


def _vs_fastest(candidate: Candidate, best: Candidate) -> str:
    if candidate is best:
        return "first"
    slower = units.percent(1 - best_share(candidate, best), 0)
    return f"-{slower}" if slower != units.percent(0.0, 0) else slower


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


def _shares(parts: Mapping[str, float], show: Any) -> str:
    whole = sum(parts.values())
    large = sorted(((value, name) for name, value in parts.items() if value >= 0.01 * whole), reverse=True)
    return ", ".join(f"{name} {show(value)}" for value, name in large)


def _too_large(nearly: Sequence[Candidate], question: Question, screen: Screen) -> str:
    lines = [f"too large for {units.gibibytes(question.memory_bytes)} with any micro-batch and recomputation:"]
    lines += [
        f"  {layout_name(candidate.workload)}: {units.gibibytes(candidate.missing_bytes)} missing, "
        f"most of it {largest_part(candidate.memory)}"
        for candidate in nearly[:MOST_TOO_LARGE]
    ]
    if len(nearly) > MOST_TOO_LARGE:
        lines.append(f"  and {plural(len(nearly) - MOST_TOO_LARGE, 'more layout')}")
    return "\n".join(screen.prose(line, 4) for line in lines)


def largest_part(memory: MemoryPrediction) -> str:
    """Return the name of the largest part."""
    return MEMORY_NAMES[max(memory.parts, key=lambda part: memory.parts[part])]


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
