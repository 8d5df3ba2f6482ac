"""The table of each workload, sorted by speed, below the sentence that says which configuration is fastest."""

from collections.abc import Sequence

from tprimat.analyze.compare import Ranking
from tprimat.core import units
from tprimat.report.catalogue import FLOPS, MFU, TOKENS, heading_of, shown_columns
from tprimat.report.limits import distance_from_limits
from tprimat.report.names import heading, short_names
from tprimat.report.screen import PLAIN, Painted, Screen
from tprimat.report.tables import columns
from tprimat.report.words import apart, differing, headline, proven

VS_FASTEST = "vs fastest"


def blocks(rankings: Sequence[Ranking], screen: Screen = PLAIN, *, say_apart: bool = True) -> str:
    """Return one block for each workload: what it is, the winner, and its configurations, fastest first.

    `say_apart`: why workloads are not compared with each other, where no verdict follows that says it.
    """
    parts = []
    for number, ranking in enumerate(rankings):
        names, best = short_names(ranking.groups), ranking.best
        metrics = [metric for metric in shown_columns(ranking.groups) if metric is not TOKENS]
        header = ["configuration", *(heading_of(metric, ranking.groups) for metric in (TOKENS, *metrics))]
        rows = []
        for group in ranking.groups:
            name = Painted(names[id(group)], "winner") if group is best and proven(ranking) else names[id(group)]
            numbers = [(metric, metric.value(group)) for metric in metrics]
            # The interval of FLOP/s repeats that of tokens/s.
            cells = [metric.show(one) if metric is FLOPS and one is not None else metric.text(group) for metric, one in numbers]
            rows.append([name, TOKENS.text(group), *cells])
        if len(rows) > 1:
            header.insert(2, VS_FASTEST)
            for position, row in enumerate(rows):
                row.insert(2, vs_fastest(ranking, position))
        lines = [screen.prose(heading(ranking), meaning="heading")]
        lines += [screen.prose(line, 2, "winner" if proven(ranking) else None) for line in headline(ranking)]
        lines += [screen.prose(line, 2) for line in differing(ranking)]
        if MFU.value(best) is not None:  # a caveat says why there is none
            limits = distance_from_limits(best, names[id(best)] if ranking.lead else "It")
            lines.append(screen.prose(" ".join(filter(None, limits)), 2))
        lines += [screen.prose(reason, 2, "quiet") for reason in apart(rankings[:number], ranking) if say_apart]
        parts.append("\n".join([*lines, "", columns(header, rows, screen=screen)]))
    return "\n\n".join(parts)


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
