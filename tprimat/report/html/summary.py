"""The page's summary: for each workload who wins, by how much, how sure, and how far from the machine's limits."""

import re
from collections.abc import Sequence
from html import escape

from tprimat import units
from tprimat.analyze.compare import Verdict
from tprimat.analyze.groups import Group, accelerator_name, ranks, tokens_per_step
from tprimat.analyze.ranking import Ranking, throughput
from tprimat.analyze.roofline import Limit, limits
from tprimat.records.schema import RunRecord
from tprimat.report.comparison import COLUMNS, Comparison, change, sentence, with_interval

MOST_CARDS = 6
"""Workloads that are summed up in full sight; the others fold away."""
TILES = ("tokens/s/GPU", "model FLOP/s/GPU", "MFU", "of measured matmul", "step time", "peak memory")
CELLS = dict(COLUMNS)


def summary(found: Sequence[Ranking], comparison: Comparison) -> str:
    """Cards, one a workload; of workloads with one configuration alone the later ones fold away first."""
    if not found:
        return '<p class="lead">No run counts, so there is nothing to rank. What went wrong stands under “Not counted”.</p>'
    cards = [_card(race) for race in sorted(found, key=lambda race: len(race.groups) == 1)]
    shown = '<div class="cards">' + "".join(cards[:MOST_CARDS]) + "</div>"
    rest = cards[MOST_CARDS:]
    if rest:
        shown += f'<details><summary>{len(rest)} more workloads</summary><div class="cards">{"".join(rest)}</div></details>'
    return shown + _verdicts(comparison)


def workload(run: RunRecord) -> str:
    """What runs must share to be ranked together, in words."""
    return ", ".join(
        [
            run.model if run.size == "full" else f"{run.model} {run.size}",
            _known(tokens_per_step(run), "{} tokens a step", "tokens a step not recorded"),
            _known(run.sequence_tokens, "sequences of {}", "sequence length not recorded"),
            run.matmul_dtype or "dtype not recorded",
            ranks(run) or "GPU count not recorded",
        ]
    )


def _known(value: int | None, text: str, otherwise: str) -> str:
    return otherwise if value is None else text.format(units.count(value))


def _card(race: Ranking) -> str:
    best = race.best
    paragraphs = [_margin(race), *_other_machines(race), _bounds(best)]
    return (
        f'<article class="card"><p class="eyebrow">{escape(workload(best.run))}</p><h3>{_headline(race)}</h3>'
        f"{_tiles(best)}{''.join(f'<p>{_prose(text)}</p>' for text in paragraphs if text)}</article>"
    )


def _prose(text: str) -> str:
    """A number stays with its unit, a command on its line."""
    joined = re.sub(r"(?<=\d) (?=%|GiB|TFLOP)", "\u00a0", escape(text))
    return joined.replace(PROBE_COMMAND, f"<code>{PROBE_COMMAND}</code>")


def _headline(race: Ranking) -> str:
    name = f"<strong>{escape(race.best.label)}</strong>"
    if throughput(race.best) is None:
        return f"{name}: throughput not known"
    if len(race.groups) == 1:
        return f"{name} is the only configuration of this workload"
    if race.level:
        return f"{name} leads, but not by more than the noise"
    return f"{name} trains fastest"


def _tiles(group: Group) -> str:
    tiles = [(name, CELLS[name](group)) for name in TILES]
    shown = [(name, text) for name, text in tiles if text != units.ABSENT]
    return (
        "<dl class=tiles>"
        + "".join(f"<div><dt>{escape(name)}</dt><dd>{_number(text)}</dd></div>" for name, text in shown)
        + "</dl>"
    )


def _number(text: str) -> str:
    value, bracket, interval = text.partition(" [")
    value, alone, _ = value.partition(" (n = 1)")
    small = "n = 1, no interval" if alone else f"[{interval}" if bracket else ""
    return escape(value) + (f"<small>{escape(small)}</small>" if small else "")


def _margin(race: Ranking) -> str:
    """By how much the best leads, and how sure that is."""
    if race.lead is None:
        return ""
    second = race.lead.baseline
    if race.lead.ratio is None:
        return ""
    if race.lead.outcome == "faster":
        quicker = change(race.lead.ratio.value)
        than = "as" if quicker.endswith("as fast") else "than"
        return f"It is {quicker} {than} {second}, the next ({_surety(race.lead)})." + _also(race)
    names = ", ".join(group.label for group in race.level[:3]) + (" and others" if len(race.level) > 3 else "")
    return f"No difference is shown to {names} ({units.signed_percent(race.lead.ratio.value - 1)}; {_surety(race.lead)})."


def _also(race: Ranking) -> str:
    """A later one with a wide interval may still be level."""
    if not race.level:
        return ""
    return f" {', '.join(group.label for group in race.level)} measured too loosely to be told from it."


def _surety(found: Verdict) -> str:
    ratio = found.ratio
    if ratio is None or ratio.low is None or ratio.high is None:
        return f"no interval from a single step; {found.evidence}"
    low, high = (units.signed_percent(end - 1) for end in (ratio.low, ratio.high))
    return f"95 % interval {low} to {high}; {found.evidence}"


def _other_machines(race: Ranking) -> list[str]:
    """The fastest on each other accelerator."""
    seen = {accelerator_name(race.best.run)}
    said = []
    for group in race.groups[1:]:
        name = accelerator_name(group.run)
        if name not in seen and throughput(group) is not None:
            seen.add(name)
            speed = with_interval(throughput(group), units.significant)
            said.append(f"Fastest on {name}: {group.label}, {speed} tokens/s/GPU.")
    return said


def _bounds(group: Group) -> str:
    """How far it is from what its machine can give."""
    found = limits(group)
    compute = [limit for limit in found if limit.kind != "memory"]
    if not compute:
        reason = next((item.metrics.mfu_absent_because for item in group.runs if item.metrics), None)
        known = f"How far it is from the machine's limit is not known: {reason}." if reason else ""
        return " ".join([known, *(_share(limit) + "." for limit in found)]).strip()
    said = "It " + " and ".join(_share(limit) for limit in found) + "."
    binding = [limit for limit in found if limit.binds]
    if binding:
        return said + " " + " ".join(BINDING[limit.kind] for limit in binding)
    hint = "" if any(limit.kind == "measured matmul" for limit in found) else PROBE
    return said + f" Neither compute nor memory is used up: what is left of the step goes to {REST}.{hint}"


REST = "communication, memory traffic, gaps between kernels and products below their peak rate"
PROBE_COMMAND = "./benchmark.py --probe gemm"
PROBE = f" {PROBE_COMMAND} measures what a bare product reaches here."
BINDING = {
    "peak": "The peak of the matrix units bounds it.",
    "measured matmul": "The matrix products themselves bound it: they run as fast as this machine was measured to run them.",
    "memory": "Memory bounds the batch: a larger micro-batch does not fit.",
}


def _share(limit: Limit) -> str:
    if limit.kind == "peak":
        return f"reaches {units.percent(limit.share)} of the GPU's dense peak of {units.teraflops(limit.size)}"
    if limit.kind == "measured matmul":
        return f"reaches {units.percent(limit.share)} of the fastest product measured on this machine"
    return f"fills {units.percent(limit.share, 0)} of {units.gibibytes(limit.size)} of memory"


def _verdicts(comparison: Comparison) -> str:
    if not comparison.verdicts:
        return ""
    lines = "".join(f"<li>{escape(sentence(found))}</li>" for found in comparison.verdicts)
    return f"<details><summary>All verdicts ({len(comparison.verdicts)})</summary><ul>{lines}</ul></details>"
