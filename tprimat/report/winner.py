"""The table of each workload, sorted by speed, below the sentence that says which configuration is fastest."""

from collections.abc import Sequence

from tprimat.analyze.compare import Ranking
from tprimat.analyze.groups import Group
from tprimat.core import units
from tprimat.report.catalogue import (
    COST,
    DROPPED,
    ENERGY,
    EXPERT_LOAD,
    FLOPS,
    LOSS,
    MATMUL_SHARE,
    MEMORY_ERROR,
    MFU,
    PEAK_MEMORY,
    RANK_LOAD,
    RESERVED_MEMORY,
    RUNS,
    STEP_ERROR,
    STEP_TIME,
    STEPS,
    TOKENS,
    Metric,
    heading_of,
    shown_columns,
)
from tprimat.report.limits import distance_from_limits
from tprimat.report.names import heading, short_names
from tprimat.report.screen import PLAIN, Painted, Screen
from tprimat.report.tables import columns
from tprimat.report.words import apart, differing, headline, proven

VS_FASTEST = "vs fastest"
DROPPED_FIRST = (
    STEPS,
    STEP_ERROR,
    FLOPS,
    MEMORY_ERROR,
    LOSS,
    EXPERT_LOAD,
    ENERGY,
    RUNS,
    RANK_LOAD,
    STEP_TIME,
    MATMUL_SHARE,
    COST,
    DROPPED,
    RESERVED_MEMORY,
    PEAK_MEMORY,
    MFU,
    TOKENS,
)
"""Columns in the order in which a narrow terminal loses them."""


def blocks(rankings: Sequence[Ranking], screen: Screen = PLAIN, *, say_apart: bool = True) -> str:
    """Return one block for each workload: what it is, the winner, and its configurations, fastest first.

    `say_apart`: why workloads are not compared with each other, where no verdict follows that says it.
    """
    shown = shown_columns([group for ranking in rankings for group in ranking.groups])
    parts = []
    for number, ranking in enumerate(rankings):
        names = short_names(ranking.groups)
        rows = [
            [
                _painted(names[id(group)], group, ranking),
                TOKENS.text(group),
                vs_fastest(ranking, position),
                *(_cell(metric, group) for metric in shown if metric is not TOKENS),
            ]
            for position, group in enumerate(ranking.groups)
        ]
        named = {metric: heading_of(metric, ranking.groups) for metric in (*DROPPED_FIRST, *shown)}
        header = ["configuration", named[TOKENS], VS_FASTEST, *(named[metric] for metric in shown if metric is not TOKENS)]
        if len(rows) == 1:
            header.remove(VS_FASTEST)
            del rows[0][2]
        lines = [screen.prose(heading(ranking), meaning="heading")]
        lines += [screen.prose(line, 2, "winner" if proven(ranking) else None) for line in headline(ranking)]
        lines += [screen.prose(line, 2) for line in differing(ranking)]
        if MFU.value(ranking.best) is not None:  # a caveat says why there is none
            name = names[id(ranking.best)] if ranking.lead else "It"
            lines.append(screen.prose(" ".join(filter(None, distance_from_limits(ranking.best, name))), 2))
        lines += [screen.prose(reason, 2, "quiet") for reason in apart(rankings[:number], ranking) if say_apart]
        parts.append(
            "\n".join([*lines, "", columns(header, rows, screen=screen, drop=[named[metric] for metric in DROPPED_FIRST])])
        )
    return "\n\n".join(parts)


def _cell(metric: Metric, group: Group) -> str:
    """Return a cell of a table; the interval of FLOP/s repeats that of tokens/s."""
    value = metric.value(group)
    return metric.show(value) if metric is FLOPS and value is not None else metric.text(group)


def _painted(name: str, group: Group, ranking: Ranking) -> str:
    return Painted(name, "winner") if group is ranking.best and proven(ranking) else name


def vs_fastest(ranking: Ranking, position: int) -> str:
    """Return the cell of one group: how much slower than the fastest, or that this is not shown."""
    if position == 0:
        return Painted("fastest", "winner") if proven(ranking) else "first"
    verdict = ranking.against_best[position]
    if verdict is None or verdict.ratio is None:
        return units.ABSENT
    change = units.signed_percent(verdict.ratio.value - 1)
    if verdict.ratio.low is None:
        return f"{change} (n = 1)"  # single steps have no interval, so nothing tells noise from a difference
    return f"{change}, noise" if verdict.outcome == "no difference shown" else change
