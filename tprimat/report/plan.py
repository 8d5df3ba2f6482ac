"""The answer to "which layout is fastest, and does it fit": a short text with the next command, and everything as a document."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tprimat.core import units
from tprimat.core.accelerators import PLATFORM_OF, find_accelerator
from tprimat.core.flops import flop_per_token
from tprimat.core.implementations import EMBEDDED
from tprimat.core.rows import DATA, placed
from tprimat.core.rows import document as yaml_document
from tprimat.core.workload import FullWorkload
from tprimat.predict.memory import CONTEXT_BYTES
from tprimat.predict.rates import Rates
from tprimat.predict.search import Answer, Candidate, LayoutQuestion, other_routing
from tprimat.predict.time import TIME_PARTS
from tprimat.report.tables import Screen, columns, plural

SHOWN = 3
"""Layouts of a short answer."""
LEAST_SHOWN = 0.005
MOST_TOO_LARGE = 4
MOST_REFUSALS = 3
SECONDS_OF_A_DAY = 86400
USUAL_GPUS = 8
"""Of a node: what ./benchmark.py assumes of a machine that is not here."""
NAMES: Mapping[str, Mapping[str, str]] = yaml_document(DATA / "part_names.yaml")
MEMORY_NAMES, TIME_NAMES, ROUTING_NAMES = NAMES["memory"], NAMES["time"], NAMES["routing"]
LIMIT_NOT_KEPT = "No number of GPUs above keeps within the limits; this is the"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a user pays, and wants to see."""

    price: float | None = None
    """Dollars for a GPU and hour; None: not known."""
    tokens: float | None = None
    """To train on; None: not said."""
    command: str = "./benchmark.py"
    """What runs the model with its options, to which the flags of a layout are added."""
    whole: bool = False
    """Every layout, and the parts of the fastest one."""

    def bill(self, candidate: Candidate) -> tuple[float | None, float | None, float | None]:
        """Return days, and dollars of a billion tokens and of all tokens; None where the tokens or the price are not known."""
        rate = rate_of(candidate)
        days = None if self.tokens is None else self.tokens / (rate * candidate.workload.world_size) / SECONDS_OF_A_DAY
        each = None if self.price is None else 1e9 / rate / 3600 * self.price
        return days, each, None if each is None or self.tokens is None else each * self.tokens / 1e9


def rate_of(candidate: Candidate) -> float:
    """Return the expected tokens/s/GPU."""
    work = candidate.workload
    return work.tokens_per_step / candidate.step_seconds / work.world_size


def interval(candidate: Candidate) -> tuple[float | None, float | None]:
    """Return the ends of the interval of tokens/s/GPU; None where the accelerator is not in the table."""
    step, rate = candidate.expected, rate_of(candidate)
    return (None, None) if step is None else (rate * step.step_seconds / step.high, rate * step.step_seconds / step.low)


def mfu_of(candidate: Candidate, rates: Rates) -> float | None:
    """Return the share of the dense peak of the dtype, by the causal count of FLOP."""
    work, accelerator = candidate.workload, find_accelerator(rates.accelerator)
    peak = None if accelerator is None else accelerator.dense_flops.get(work.matmul_dtype)
    return None if peak is None else rate_of(candidate) * flop_per_token(work.shape, work.sequence_tokens) / peak


def layout_name(workload: FullWorkload) -> str:
    """Name a layout: 'TP4 PP2 VPP2 CP2 EP8 DP4', FSDP where replicas share weights; degrees of 1 are left out, but for these."""
    replicas = "FSDP" if workload.implementation is not None and workload.implementation.shards_weights else "DP"
    return workload.layout_words(ones=["dp"]).replace("DP", replicas)


def how_sure(best: Candidate, rates: Rates) -> str:
    """Say what the predictions come from, and how good they are."""
    step = best.expected
    if step is None:
        return f"Predicted from {rates.source}; their error is not known."

    def range_of(spread: float) -> str:
        return " to ".join(units.signed_percent(math.expm1(end), 0) for end in (-spread, spread))

    measured_on = ", ".join(f"{rows} on {accelerator}" for accelerator, rows in step.measured_on.items())
    kind = step.kind.replace("embedded", "megatron")  # the engine, as the commands call it
    proof = f"of {units.count(step.rows)} held-out results ({kind}: {measured_on}), 90 % lay within"
    words = f"Predicted from {rates.source}: {proof} {range_of(step.spread)} of the prediction."
    width, late = math.log(step.step_seconds / step.low), step.high / step.step_seconds - 1
    assumed = f"{range_of(width)} is assumed" if step.widened else "the same range is assumed"
    lacking = [f"on {rates.accelerator}"] * (rates.accelerator not in step.measured_on) + ["on several nodes"] * step.farther
    if lacking:
        words += f" None was measured {' or '.join(lacking)}: {assumed}."
    elif step.widened:
        words += f" This run differs from them: {assumed}."
    slow = f" With the slowest host that we measured, it takes {units.percent(late, 0)} longer."
    return words + slow if late > math.expm1(width) + 1e-9 else words


def text(rated: tuple[Answer, Rates], screen: Screen, enough: Candidate | None, wishes: Wishes) -> str:
    """Format the answer for a terminal; `enough` is, where nothing fits, a layout on the fewest GPUs that are enough."""
    answer, rates = rated
    question, layouts = answer.question, answer.layouts()
    parts = [_question(question, rates, screen)]
    if layouts:
        shown = layouts if wishes.whole else layouts[:SHOWN]
        parts.append(screen.prose(how_sure(layouts[0], rates)))
        parts.append(_table(shown, question, screen))
        parts.append("\n".join(_next(rated, len(shown), screen, wishes)))
    else:
        parts.append(screen.prose(f"Nothing fits in {units.gibibytes(question.memory_bytes)} per GPU."))
        parts += [screen.prose(_enough(enough, question))] if enough else []
    if wishes.whole and layouts:
        parts.append(_bars(layouts[0], screen))
    if (nearly := answer.nearly()) and (wishes.whole or not layouts):
        parts.append(_too_large(nearly, question, screen))
    if answer.refused and (wishes.whole or not layouts):
        refused = "; ".join(reason.removesuffix(".") for reason in answer.refused[:MOST_REFUSALS])
        parts.append(screen.prose(f"Left out, because the engine refuses them: {refused}."))
    return "\n\n".join(parts)


def chosen(
    answers: Sequence[tuple[Answer, Rates]], wishes: Wishes, budget: float | None, deadline: float | None
) -> tuple[Answer, Rates]:
    """Return the answer for one of several numbers of GPUs: the cheapest in time, else the fastest that can be paid.

    Without a limit, or where none keeps a deadline, the fastest counts; where none can be paid, the cheapest.
    """

    def limits(rated: tuple[Answer, Rates]) -> tuple[bool, float]:
        best = next(iter(rated[0].fitting), None)
        if best is None:
            return False, -math.inf
        kept = keeps(best, wishes, budget, deadline)
        if deadline is None and not kept:
            return kept, -(wishes.bill(best)[2] or 0.0)
        if deadline is None or not kept:
            return kept, rate_of(best) * best.workload.world_size
        return kept, round(rate_of(best), -2) - 1e-3 * best.workload.world_size  # the cheapest; of like ones the fewest GPUs

    return max(answers, key=limits)


def keeps(best: Candidate, wishes: Wishes, budget: float | None, deadline: float | None) -> bool:
    """Whether training with a layout takes no more dollars and days than these."""
    days, _, cost = wishes.bill(best)
    return (deadline is None or (days or 0.0) <= deadline) and (budget is None or (cost or 0.0) <= budget)


def counts_text(answers: Sequence[tuple[Answer, Rates]], money: Wishes, screen: Screen) -> str:
    """Format the fastest layout of each of several numbers of GPUs."""
    codes, rows = {one.workload.code.name for answer, _ in answers for one in answer.fitting[:1]}, []
    for answer, _ in answers:
        cells = ["nothing fits", "", "", "", ""]
        if best := next(iter(answer.fitting), None):
            days, each, cost = money.bill(best)
            name = best.workload.code.name
            cells = [
                layout_name(best.workload) + (f", {name}" if len(codes) > 1 and name != EMBEDDED.name else ""),
                units.count(rate_of(best)),
                "" if days is None else units.significant(days),
                "" if each is None else f"${units.significant(each)}",
                "" if cost is None else f"${units.count(cost)}",
            ]
        rows.append([str(answer.question.gpus), *cells])
    header = ["GPUs", "fastest layout", "tokens/s/GPU", "days", "$/billion tokens", "cost"]
    return columns(header, rows, left=2, screen=screen)


def _question(question: LayoutQuestion, rates: Rates, screen: Screen) -> str:
    nodes, asked = question.gpus // question.gpus_per_node, question.work
    where = plural(question.gpus, "GPU") + (f" in {units.count(nodes)} nodes" if nodes > 1 else "")
    work = f"{asked.global_batch_sequences:,} x {asked.sequence_tokens:,} tokens a step, {asked.format}"
    if asked.shape.experts and (routing := ROUTING_NAMES.get(asked.routing or "")):
        work += f", {routing}, {'DeepEP or HybridEP' if asked.code.dispatches_once_a_node else 'alltoall'}"
        capacity = asked.expert_capacity_factor
        work += "" if capacity is None else f", experts drop tokens beyond {capacity:g} x the mean"
    device = f"{rates.accelerator}, {units.gibibytes(question.memory_bytes)} each"
    runs = "engine megatron" if asked.code.name == EMBEDDED.name else asked.code.name  # as --engine names it
    return screen.prose(f"{asked.shape.name} on {where} ({device}): {work}, {runs}")


def _next(rated: tuple[Answer, Rates], shown: int, screen: Screen, wishes: Wishes) -> list[str]:
    """Return lines below the table: what it leaves out, time and money, whether to measure, and the commands."""
    rates, question, layouts = rated[1], rated[0].question, rated[0].layouts()
    best = layouts[0]
    lines = [f"{plural(len(layouts) - shown, 'more layout')}: --all"] if len(layouts) > shown else []
    lines += [screen.prose(line) for line in (_money(best, rates, wishes), _other_routing(best, rates)) if line]
    # Errors of one question are shared in part, so half the width of the best's interval tells layouts apart.
    width = 0.0 if best.expected is None else best.expected.high / best.step_seconds
    close = sum(candidate.step_seconds <= best.step_seconds * width**0.5 for candidate in layouts)
    if close > 1:
        lines.append(screen.prose(f"Too close to call: the first {close} of {len(layouts)} are within each other's interval."))
    if (why := question.unstarted) is not None:
        reason = " ".join(filter(None, ("TPrimat cannot start this run.", why.what, why.why, why.fix and f"Try: {why.fix}.")))
        return [*lines, screen.prose(reason)]
    lines.append(f"run the fastest:      {wishes.command} {flags_of(best.workload, question, rates)}")
    measured = f"measure the first {min(SHOWN, len(layouts))}:  {wishes.command} {flags_of(None, question, rates)}"
    return [*lines, measured] if close > 1 else lines


def _money(best: Candidate, rates: Rates, money: Wishes) -> str:
    mfu, (days, each, cost) = mfu_of(best, rates), money.bill(best)
    words = [] if mfu is None else [f"MFU {units.percent(mfu, 0)}"]
    if days is not None and money.tokens is not None:
        hours = days * 24 * best.workload.world_size
        words.append(f"{units.si(money.tokens)} tokens take {units.significant(days)} days, {units.count(hours)} GPU-hours")
    words += [] if cost is None else [f"${units.count(cost)}"]
    words += [] if each is None else [f"${units.significant(each)} per billion tokens"]
    return f"The fastest: {', '.join(words)}." if words else ""


def _other_routing(best: Candidate, rates: Rates) -> str:
    other = other_routing(best, rates)
    if other is None or other.workload.routing is None:
        return ""
    return f"Under {ROUTING_NAMES[other.workload.routing]}: {units.count(rate_of(other))} tokens/s/GPU."


def _enough(enough: Candidate, question: LayoutQuestion) -> str:
    work = enough.workload
    other = "" if work.code == question.work.code else f", with {work.code.name}"
    how = f"{layout_name(work)}, micro-batch {work.micro_batch}, recompute {work.recompute_words}"
    return (
        f"{plural(work.world_size, 'GPU')} are enough: {how}, at most {units.gibibytes(enough.memory.device_bytes)} a GPU{other}."
    )


def _table(layouts: Sequence[Candidate], question: LayoutQuestion, screen: Screen) -> str:
    best, rows = layouts[0], []
    for candidate in layouts:
        work, slower = candidate.workload, 1 - best.step_seconds / candidate.step_seconds
        behind = units.percent(slower, 0) if slower >= LEAST_SHOWN else ""
        again = plural(work.recompute_layers, "layer") if work.recompute_layers else work.recompute
        low, high = interval(candidate)
        ends = "" if low is None or high is None else f" [{units.count(low)}, {units.count(high)}]"
        rows.append(
            [
                layout_name(work),
                "fastest" if candidate is best else reason(candidate, best),
                str(work.micro_batch),
                "" if again == "none" else again,
                f"{units.count(rate_of(candidate))}{ends}",
                f"-{behind}" if behind else "",
                units.gibibytes(candidate.memory.expected_device_bytes),
                units.gibibytes(candidate.memory.device_bytes),
            ]
        )
    header = ["layout", "why slower", "micro", "recompute", "tokens/s/GPU", "vs fastest", "memory", "at most"]
    return columns(header, rows, left=2, screen=screen, drop=["vs fastest", "memory", "at most"])


def reason(candidate: Candidate, best: Candidate) -> str:
    """Return the one part of the step that costs a candidate most against the best, in words."""
    if candidate.time is None or best.time is None or candidate is best:
        return ""
    extra = {part: candidate.time.parts[part] - best.time.parts[part] for part in TIME_PARTS}
    part = max(extra, key=lambda name: extra[name])
    share = extra[part] / best.time.step_seconds
    if round(share, 2) <= 0:
        return "predicted to be as fast"
    why, (here, there) = NAMES["slower"].get(part, f"more {TIME_NAMES[part]}"), (candidate.workload, best.workload)
    if part in {"products", "memory", "attention"} and here.recompute == "full" != there.recompute:
        why = "recomputes activations"
    elif part == "products" and here.micro_batch < there.micro_batch:
        why = "smaller matrix products"
    return f"{why}, +{100 * share:.0f} %"


def _bars(best: Candidate, screen: Screen) -> str:
    assert best.time is not None
    need = best.memory
    beside = {
        "room for fragments": need.device_bytes - CONTEXT_BYTES - need.allocated_bytes,
        "driver and kernels": CONTEXT_BYTES,
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


def _too_large(nearly: Sequence[Candidate], question: LayoutQuestion, screen: Screen) -> str:
    lines = [f"too large for {units.gibibytes(question.memory_bytes)} with any micro-batch and recomputation:"]
    for candidate in nearly[:MOST_TOO_LARGE]:
        parts, missing = candidate.memory.parts, units.gibibytes(candidate.missing_bytes)
        most = MEMORY_NAMES[max(parts, key=lambda part: parts[part])]
        lines.append(f"  {layout_name(candidate.workload)}: {candidate.fit}, {missing} missing, most of it {most}")
    more = len(nearly) - MOST_TOO_LARGE
    lines += [f"  and {plural(more, 'more layout')}"] if more > 0 else []
    return "\n".join(screen.prose(line, 4) for line in lines)


# The flags of ./benchmark.py that run what a plan predicts, on the machine that it is for.


def flags_of(workload: FullWorkload | None, question: LayoutQuestion, rates: Rates) -> str:
    """Return the flags that run a layout as it was predicted, or it might not fit; None: that measure the best ones."""
    accelerator = find_accelerator(rates.accelerator)
    platform = None if accelerator is None else PLATFORM_OF[accelerator.backend]
    in_node = min(question.gpus, question.gpus_per_node)
    flags: dict[str, object] = {
        "--engine": question.engine,
        "--platform": platform,
        "--nodes": question.gpus // in_node if question.gpus > in_node else None,
        "--gpus": in_node if in_node != USUAL_GPUS else None,
    }
    settings: dict[str, object] = {}
    of_experts = {
        "routing": "balanced" if question.work.routing == "balanced" else None,
        "training.moe_expert_capacity_factor": question.work.expert_capacity_factor,
    }
    if workload is None:
        flags |= {"--parallel": f"auto:{SHOWN}", "--global-batch-size": question.work.global_batch_sequences}
    else:
        layout, again, own = workload.layout, workload.recompute, f"platform_optimizations.{platform}.recompute"
        flags |= {
            "--tp": layout.tensor,
            "--pp": layout.pipeline,
            "--micro-batch-size": workload.micro_batch,
            "--global-batch-size": workload.micro_batch * workload.accumulation * layout.data,
        }
        settings = {
            "vpp": layout.virtual_pipeline,
            "cp": layout.context if layout.context > 1 else None,
            "ep": layout.expert if layout.expert > 1 else None,
            own: None if again == "none" else again,
            f"{own}_layers": None if again == "none" else workload.recompute_layers or None,
        }
    flags |= {"--sequence-length": question.work.sequence_tokens, "--precision": question.work.format}
    words = [f"{flag} {value}" for flag, value in flags.items() if value is not None]
    return " ".join([*words, *(f"--set {name}={value}" for name, value in (settings | of_experts).items() if value is not None)])


def document(answer: Answer, rates: Rates, money: Wishes) -> dict[str, Any]:
    """Return everything in SI units, and dollars."""
    return {
        "question": placed("documents.plan_question", question=answer.question, rates=rates),
        "rates": {"source": rates.source, "measured": rates.measured},
        "fitting": [_row(candidate, answer, rates, money) for candidate in answer.fitting],
        "too_large": [_row(candidate, answer, rates, money) for candidate in answer.too_large],
        "refused": list(answer.refused),
    }


def _row(candidate: Candidate, answer: Answer, rates: Rates, money: Wishes) -> dict[str, Any]:
    time, step = candidate.time, candidate.expected
    row = placed("documents.plan_layout", candidate=candidate, work=candidate.workload)
    row["memory"] = {part: value for part, value in candidate.memory.parts.items() if value}
    if time is not None:
        (low, high), (days, each, _) = interval(candidate), money.bill(candidate)
        share = candidate.step_seconds / time.step_seconds
        row |= {
            "step_seconds": candidate.step_seconds,
            "time": {part: share * time.parts[part] for part in TIME_PARTS if time.parts[part]},
            "tokens_per_second_per_gpu": rate_of(candidate),
            "low": low,
            "high": high,
            "kind": step.kind if step else None,
            "measured_on": step.measured_on if step else None,
            "assumed": step.widened or rates.accelerator not in step.measured_on if step else None,
            "mfu": mfu_of(candidate, rates),
            "days": days,
            "dollars_per_billion_tokens": each,
            "why_not": reason(candidate, answer.fitting[0]),
        }
    if answer.fitting and candidate is answer.fitting[0]:
        other = other_routing(candidate, rates)
        row["other_routing"] = other and {"routing": other.workload.routing, "tokens_per_second_per_gpu": rate_of(other)}
    return row
