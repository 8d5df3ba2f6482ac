"""Report a comparison of runs, with each other or with published results, as text, Markdown or JSON."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tprimat.analyze.compare import QUESTION, Question, Ranking, Verdict
from tprimat.analyze.groups import Group, Measured, findings, same_runs
from tprimat.analyze.published import Neighborhood
from tprimat.core import units
from tprimat.records.store import as_document
from tprimat.report import words
from tprimat.report.catalogue import MFU, Metric, heading_of, shown_columns, tera
from tprimat.report.names import heading, short_names
from tprimat.report.tables import PLAIN, Screen, columns, escaped, table, with_interval


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of one comparison."""

    groups: tuple[Group, ...]
    verdicts: tuple[Verdict, ...]
    rankings: tuple[Ranking, ...] = ()
    """The configurations of each workload, fastest first."""
    not_counted: tuple[Measured, ...] = ()
    lost_candidates: tuple[Measured, ...] = ()
    """Those of them that are no baseline's, without copies."""
    asked: bool = False
    """Whether the user named a baseline, or wants unlike workloads compared: then the verdicts are printed."""
    question: Question = QUESTION


REPEAT = "./benchmark.py --resume repeats such runs."
"""What to do where no run counts."""


def rows_of(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table."""
    metrics = shown_columns(comparison.groups)
    header = ["configuration", *(heading_of(metric, comparison.groups) for metric in metrics)]
    return header, [[group.label, *(metric.text(group) for metric in metrics)] for group in comparison.groups]


def text(comparison: Comparison, screen: Screen = PLAIN) -> str:
    """Format a comparison for a terminal: the winner and the table of each workload, what to know, the runs that do not count."""
    lines, said = [], [words.sentence(one) for one in comparison.verdicts if comparison.asked]
    if comparison.groups:
        lines += [blocks(comparison.rankings, screen, verdicts_follow=bool(said)), ""]
        lines += [*(screen.prose(line, 2) for line in said), *[""] * bool(said)]
    lines += [screen.prose(line, 2) for line in _remarks(comparison, said)]
    if comparison.not_counted and not comparison.groups:
        lines += ["", screen.prose(f"No run counts, so there is nothing to compare. {REPEAT}", 2)]
    return "\n".join(lines) + "\n"


def _remarks(comparison: Comparison, said: Sequence[str]) -> list[str]:
    caveats = words.caveats(comparison.rankings, findings(comparison.groups, words.run_name)) if comparison.groups else []
    lost = [f"Not counted: {words.run_name(item)}: {words.not_counted_words(item)}" for item in comparison.not_counted]
    return [line for line in (*caveats, *lost) if not any(line in verdict for verdict in said)]


def markdown(comparison: Comparison) -> str:
    """Format a comparison as a Markdown table and a list of remarks."""
    said = [words.sentence(one) for one in comparison.verdicts]
    remarks = [*said, *_remarks(comparison, said)]
    return "\n".join([table(*rows_of(comparison)), "", *(f"- {escaped(line)}" for line in remarks)]) + "\n"


def as_json(comparison: Comparison) -> str:
    """Format groups with the metrics of every run, verdicts and runs that do not count as JSON."""
    document = {
        "groups": [
            {"label": group.label, "runs": [_place(item) | {"metrics": as_document(item.metrics)} for item in group.runs]}
            for group in comparison.groups
        ],
        "verdicts": [
            {key: value for key, value in asdict(verdict).items() if key not in {"losses", "folders", "spreads"}}
            | {
                "differences": [words.difference(entry) for entry in verdict.differences],
                "other_loss": words.loss_words(verdict) or None,
                "losses_open": words.finding_words(verdict.losses_open) if verdict.losses_open else None,
                "evidence": words.evidence_words(verdict),
                "fewest_runs": min(verdict.runs) if verdict.ratio else 1,
                "traits": [{"trait": one.name, "sides": one.words, "effect": one.effect} for one in verdict.traits],
                "words": words.sentence(verdict),
            }
            for verdict in comparison.verdicts
        ],
        "rankings": [
            {
                "workload": heading(ranking),
                "words": " ".join([*words.headline(ranking), *words.differing(ranking)]),
                "lead": None if ranking.lead is None else as_document(ranking.lead.ratio),
                "fastest_first": [group.label for group in ranking.groups],
            }
            for ranking in comparison.rankings
        ],
        "not_counted": [_place(item) | {"because": words.not_counted_words(item)} for item in comparison.not_counted],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _place(item: Measured) -> dict[str, object]:
    return {"run_id": item.result.run.run_id, "path": str(item.result.path)}


# Our results next to published ones, on a common basis.

HEADER = ("result", "tokens/s/GPU", "TFLOP/s/GPU", "of dense peak", "ours is")
CAPTION = "FLOP counted causal throughout, against the dense peak. The ratios are only a rough guide; the differences are below."


def published_text(neighborhoods: Sequence[Neighborhood], screen: Screen = PLAIN) -> str:
    """Return, for a terminal, a table and the differences for each configuration of ours, then each source."""
    if not neighborhoods:
        return "No published neighbors: no configuration here has a FLOP/s to compare with them.\n"
    results = {neighbor.result.name: neighbor.result for one in neighborhoods for neighbor in one.neighbors}
    sources = "\n".join(f"{name}\n  source  {result.source}" for name, result in results.items())
    blocks = [_block(one, screen) for one in neighborhoods]
    return "\n\n".join([screen.prose("Published neighbors. " + CAPTION), *blocks, sources]) + "\n"


def _block(neighborhood: Neighborhood, screen: Screen) -> str:
    ours, lines = neighborhood.ours, []
    flops, share = ours.flops_per_gpu, ours.utilization
    per_gpu = with_interval(ours.per_gpu, units.count)
    own = [per_gpu, tera(flops.value if flops else None), units.percent(share.value if share else None)]
    rows = [[ours.group.label, *own, units.ABSENT]]
    for one in neighborhood.neighbors:
        result, rebased = one.result, one.rebased
        rate = [units.count(result.tokens_per_second_per_gpu), tera(rebased.flops_per_second_per_gpu), units.percent(rebased.mfu)]
        rows.append([result.name, *rate, f"{one.ratio:.2f} x"])
        unlike = [f"{each.name} {_plain(each.ours)} here, {_plain(each.theirs)} there" for each in one.differences]
        differs = "; ".join(unlike) or "nothing that the source states"
        lines.append(screen.prose(f"{result.name} differs: {differs}", 2))
    return "\n".join([columns(HEADER, rows, screen=screen), *lines])


def _plain(value: object) -> str:
    if value is None:
        return "not stated"
    return units.count(value) if isinstance(value, int) else str(value)


VS_FASTEST = "vs fastest"
Cell = tuple[str, float | None]
"""Text, and what it sorts by."""


def cells(ranking: Ranking, metrics: Sequence[Metric]) -> list[list[Cell]]:
    """Return the row of each configuration behind its name: how much slower than the fastest it is, and its metrics."""
    rows: list[list[Cell]] = []
    for group, verdict in zip(ranking.groups, ranking.against_best, strict=True):
        change = None if verdict is None or verdict.ratio is None else verdict.ratio.value - 1
        against = ("same run", 0.0) if rows and same_runs(ranking.best, group) else (_vs_fastest(verdict), change)
        rows.append([against, *((one.text(group), one.value(group)) for one in metrics)])
    if len(rows) > 1:
        rows[0][0] = ("fastest" if ranking.lead and ranking.lead.outcome == "faster" else "first", 0.0)
    return rows


def _vs_fastest(verdict: Verdict | None) -> str:
    if verdict is None or verdict.ratio is None:
        return units.ABSENT
    change = units.signed_percent(verdict.ratio.value - 1)
    if verdict.ratio.low is None:
        return f"{change} (n = 1)"  # single steps have no interval, so nothing tells noise from a difference
    return f"{change}, noise" if verdict.outcome == "no difference shown" else change


def blocks(rankings: Sequence[Ranking], screen: Screen = PLAIN, *, verdicts_follow: bool = False) -> str:
    """Return one block for each workload: what it is, the winner, and its configurations, fastest first.

    In what configurations and workloads differ stands there, too, unless `verdicts_follow`, which say it.
    """
    parts = []
    for number, ranking in enumerate(rankings):
        names, best, metrics = short_names(ranking.groups), ranking.best, shown_columns(ranking.groups)
        header = ["configuration", VS_FASTEST, *(heading_of(metric, ranking.groups) for metric in metrics)]
        made = zip(ranking.groups, cells(ranking, metrics), strict=True)
        rows = [[names[id(group)], *(text for text, _ in row)] for group, row in made]
        lines = [screen.prose(heading(ranking))]
        differing = () if verdicts_follow else words.differing(ranking)
        lines += [screen.prose(line, 2) for line in (*words.headline(ranking), *differing)]
        path = best.runs[0].result.path
        # without MFU a caveat says why; inside an archive nothing explains
        if MFU.value(best) is not None and path.exists() and str(path).isprintable():
            lines.append(screen.prose(f"Where the throughput went: python3 -m tprimat explain {shlex.quote(str(path))}", 2))
        lines += [screen.prose(reason, 2) for reason in words.apart(rankings[:number], ranking) if not verdicts_follow]
        parts.append("\n".join([*lines, "", columns(header, rows, screen=screen)]))
    return "\n\n".join(parts)
