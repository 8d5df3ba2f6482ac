"""The page's table: one row a configuration, one body a workload, so that sorting never ranks what must not be compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tprimat import units
from tprimat.analyze.compare import Verdict
from tprimat.analyze.groups import Group, accelerator_name, group_estimate
from tprimat.analyze.ranking import Ranking
from tprimat.records.metrics import Estimate, RunMetrics
from tprimat.records.schema import RunRecord
from tprimat.report.comparison import Comparison, rows_of
from tprimat.report.html.summary import workload
from tprimat.report.plots.style import Look

Number = Callable[[Group], float | None]

DASHES = {"-": "", "--": "6 3", ":": "1.5 3", "-.": "6 3 1.5 3"}


@dataclass(frozen=True, slots=True)
class Filter:
    """A trait by which rows can be chosen."""

    name: str
    value: Callable[[RunRecord], str]


FILTERS = (
    Filter("model", lambda run: run.model),
    Filter("accelerator", accelerator_name),
    Filter("strategy", lambda run: run.strategy or "unknown"),
    Filter("engine", lambda run: run.engine),
)


def ranking(found: Sequence[Ranking], comparison: Comparison, appearance: Sequence[Look]) -> str:
    """Controls and table; empty where no run counts."""
    if not comparison.groups:
        return '<p class="note">No run counts.</p>'
    header, rows = rows_of(comparison)
    names = [*header[:1], "against the best", *header[1:]]
    head = "".join(_heading(name) for name in names)
    bodies, place = [], 0
    for race in found:
        lines = []
        for group, against in zip(race.groups, race.against_best, strict=True):
            row = _row(group, place, names, [*rows[place][:1], _against(race, group, against), *rows[place][1:]])
            lines.append(row.replace("SWATCH", swatch(appearance[place]), 1))
            place += 1
        bodies.append(
            f'<tbody><tr class="workload"><th colspan="{len(names)}" scope="rowgroup">{escape(workload(race.best.run))}</th></tr>'
        )
        bodies.append("".join(lines) + "</tbody>")
    table = f'<div class="scroll"><table id="ranking"><thead><tr>{head}</tr></thead>{"".join(bodies)}</table></div>'
    return _controls(comparison.groups) + table + f'<p class="note">{NOTE}</p>'


NOTE = (
    "[low, high]: 95 % interval, between runs where there are several, else between the steps of one run. Rows are sorted "
    "inside a workload: speeds of unlike workloads are not compared."
)


def swatch(look: Look) -> str:
    """The line that a configuration has in all plots."""
    colour = "currentColor" if look.colour == "#000000" else look.colour
    return (
        '<svg class="swatch" width="26" height="10" aria-hidden="true"><line x1="1" x2="25" y1="5" y2="5" '
        f'stroke="{colour}" stroke-width="3" stroke-dasharray="{DASHES[look.line]}"/></svg>'
    )


def _heading(name: str) -> str:
    kind = "text" if name == "configuration" else "number"
    return f'<th scope="col" class="{kind}"><button type="button" data-kind="{kind}">{escape(name)}</button></th>'


def _row(group: Group, place: int, names: Sequence[str], cells: Sequence[str]) -> str:
    traits = " ".join(f'data-{trait.name}="{escape(trait.value(group.run))}"' for trait in FILTERS)
    columns = []
    for name, text in zip(names, cells, strict=True):
        if name == "configuration":
            columns.append(f'<th scope="row" data-sort="{escape(text)}">SWATCH<span>{escape(text)}</span></th>')
            continue
        number = NUMBERS[name](group) if name in NUMBERS else _ratio_key(text)
        key = "" if number is None else f"{number:.9g}"
        columns.append(f'<td data-label="{escape(name)}" data-sort="{key}">{_cell(text)}</td>')
    return f'<tr data-group="{place}" {traits}>{"".join(columns)}</tr>'


def _cell(text: str) -> str:
    value, bracket, interval = text.partition(" [")
    small = f"<small>[{escape(interval)}</small>" if bracket else ""
    return f"<span>{escape(value)}{small}</span>"


def _against(race: Ranking, group: Group, found: Verdict | None) -> str:
    if group is race.best and len(race.groups) > 1:
        return "best"
    if found is None or found.ratio is None:
        return units.ABSENT
    change = units.signed_percent(found.ratio.value - 1)
    if found.ratio.low is None or found.ratio.high is None:
        return change
    low, high = (units.signed_percent(end - 1) for end in (found.ratio.low, found.ratio.high))
    level = ", level" if found.outcome == "no difference shown" else ""
    return f"{change}{level} [{low}, {high}]"


def _ratio_key(text: str) -> float | None:
    """Of the column against the best, whose text begins with its number."""
    if text == units.ABSENT:
        return None
    return 0.0 if text == "best" else float(text.partition(" %")[0].replace(",", ""))


def _value(pick: Callable[[RunMetrics], Estimate | None]) -> Number:
    return lambda group: getattr(group_estimate(group, pick), "value", None)


def _mean(pick: Callable[[RunMetrics], float | None]) -> Number:
    def number(group: Group) -> float | None:
        values = [value for item in group.runs if item.metrics and (value := pick(item.metrics)) is not None]
        return sum(values) / len(values) if values else None

    return number


NUMBERS: dict[str, Number] = {
    "runs": lambda group: len(group.runs),
    "steps": lambda group: sum(item.metrics.window.steps for item in group.runs if item.metrics),
    "tokens/s/GPU": _value(lambda m: m.tokens_per_second_per_gpu),
    "model FLOP/s/GPU": _value(lambda m: m.model_flops_per_second_per_gpu),
    "MFU": _value(lambda m: m.mfu),
    "of measured matmul": _mean(lambda m: m.share_of_measured_gemm),
    "step time": _value(lambda m: m.step_seconds),
    "peak memory": _mean(lambda m: m.peak_memory_bytes),
    "loss": _mean(lambda m: m.final_loss),
    "energy/token": _mean(lambda m: m.joules_per_token),
    "cost/M tokens": _mean(lambda m: m.cost_per_million_tokens),
}
"""What a column is sorted by."""


def _controls(groups: Sequence[Group]) -> str:
    choices = []
    for trait in FILTERS:
        values = sorted({trait.value(group.run) for group in groups})
        if len(values) > 1:
            options = "".join(f"<option>{escape(value)}</option>" for value in values)
            choices.append(
                f'<label>{trait.name}<select data-trait="{trait.name}"><option value="">all</option>{options}</select></label>'
            )
    search = (
        '<label class="search">filter<input id="search" type="search" placeholder="words of a row" autocomplete="off"></label>'
    )
    count = f'<output id="shown" aria-live="polite">{len(groups)} of {len(groups)}</output>'
    return f'<form class="controls" id="filters">{search}{"".join(choices)}{count}</form>'
