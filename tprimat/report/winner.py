"""Say which configuration of a workload is fastest: in a sentence, and in a table sorted by speed."""

import re
from collections.abc import Collection, Mapping, Sequence

from tprimat.analyze.compare import LEAST_HELD_BACK, QUESTION, Question, Ranking, Verdict, comparable, rankings
from tprimat.analyze.groups import Group, group_held_back, labels_among, spread_between_runs
from tprimat.analyze.metrics import of_machine
from tprimat.analyze.traits import (
    LISTS,
    PROCESSES,
    TRAITS,
    DifferingTrait,
    dtype_that_ran,
    few,
    on_nodes,
    ranks,
    sequence_words,
    tokens_per_step,
)
from tprimat.core import units
from tprimat.records.evidence import grade_of
from tprimat.records.schema import Estimate
from tprimat.report.catalogue import (
    COST,
    CPU_CAUTION,
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
    per_rank,
    shown_columns,
)
from tprimat.report.limits import distance_from_limits
from tprimat.report.screen import PLAIN, Painted, Screen
from tprimat.report.tables import TOO_FEW, columns, is_vague, shows_nothing, with_interval

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
MOST_NAMED = 2
"""Runs that a note names; more are counted."""
LONGEST_VALUES = 60
"""Letters of a trait's values; longer ones are in the table or in the records."""
MOST_TIED = 3
"""Names of configurations within noise; the rest are counted."""
ANYWAY = "(--even-if-different compares anyway.)"
UNLIKE_MODELS = f"Different models are not compared with each other: a token is not the same work. {ANYWAY}"


def blocks(groups: Sequence[Group], screen: Screen = PLAIN, *, say_apart: bool = True, question: Question = QUESTION) -> str:
    """Return one block for each workload: what it is, the winner, and its configurations, fastest first.

    `say_apart`: why workloads are not compared with each other, where no verdict follows that says it.
    """
    shown = shown_columns(groups)
    found = rankings(groups, question)
    parts = []
    for number, ranking in enumerate(found):
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
            name = short_names(ranking.groups)[id(ranking.best)] if ranking.lead else "It"
            lines.append(screen.prose(" ".join(filter(None, distance_from_limits(ranking.best, name))), 2))
        lines += [screen.prose(reason, 2, "quiet") for reason in apart(found[:number], ranking) if say_apart]
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


def proven(ranking: Ranking) -> bool:
    """Return whether enough runs show that the first is faster than the second."""
    return ranking.lead is not None and ranking.lead.outcome == "faster"


def shared_parts(groups: Sequence[Group]) -> dict[str, str]:
    """Return the parts that the labels of all groups have, by trait; of a single group its model and accelerator."""
    first = dict(groups[0].parts)
    if len(groups) == 1:
        return {key: words for key, words in first.items() if key in {"model", "accelerator"}}
    return {key: words for key, words in first.items() if all((key, words) in group.parts for group in groups)}


def short_names(groups: Sequence[Group]) -> dict[int, str]:
    """Return labels that tell these groups from each other, by identity, without the parts that they share."""
    if len(groups) == 1:
        labels, shared = [groups[0].parts], set(shared_parts(groups).items())
    else:
        labels = labels_among(groups)
        shared = set(labels[0]).intersection(*labels[1:])
    names = [" ".join(words for key, words in label if (key, words) not in shared).removesuffix(":") for label in labels]
    return {id(group): name or group.run.strategy or group.label for group, name in zip(groups, names, strict=True)}


IN_HEADINGS = ("gpus", "tokens", "sequence", "dtype")
"""Traits that a heading names apart from the label."""


def heading(ranking: Ranking) -> str:
    """Name what the configurations of a ranking share: model, accelerator, GPUs, tokens, sequence length, dtype."""
    run, tokens = ranking.best.run, tokens_per_step(ranking.best.run)
    shapes = {group.run.ran.shape.name for group in ranking.groups if group.run.ran.shape is not None}
    nodes = {group.run.machine.nodes for group in ranking.groups}
    facts = {
        "": " ".join(words for key, words in shared_parts(ranking.groups).items() if key not in IN_HEADINGS) or run.model,
        "shape": shapes.pop() if len(shapes) == 1 else None,
        "gpus": (ranks(run) or "") + (on_nodes(run) if len(nodes) == 1 else ""),
        "tokens": f"{units.count(tokens)} tokens a step" if tokens else None,
        "sequence": f"sequence {sequence_words(run)}" if run.ran.sequence_tokens else None,
        "dtype": dtype_that_ran(run),
    }
    return ", ".join(fact for key, fact in facts.items() if fact and key not in ranking.question.varying)


def differing(ranking: Ranking) -> list[str]:
    """Say in one line in which traits the configurations of a ranking differ, and in another which of them may not matter.

    Of two configurations both sides are named, of more the values of each trait.
    """
    judged = [found for found in ranking.against_best if found is not None]
    if len(judged) == 1:
        return [*lines_of_sides(judged[0].traits, (0, 1), ranking.question.varying), *clock_words(judged[0])]
    found = [one for verdict in judged for one in verdict.traits]
    warned = {one.key for one in found if one.effect == "warn"}
    varying = ranking.question.varying
    differ = [key for key in TRAITS if key in {one.key for one in found}]
    lines = []
    for before, keys in (
        ("Varied", [key for key in differ if key in varying]),
        ("They differ in", [key for key in differ if key not in {*varying, *warned}]),
        ("Caution, they also differ in", [key for key in differ if key in warned - set(varying)]),
    ):
        if keys:
            shown = [TRAITS[key].name + _values([one for one in found if one.key == key]) for key in keys]
            lines.append(f"{before} {', '.join(shown)}.")
    return lines + _clocks_of_many(ranking.groups, {reason for verdict in judged for reason in _notable(verdict)})


NOTABLE_SHARE = 0.1
"""Difference of the shares of readings with clocks held back, from which two sides are said to differ."""


def clock_words(verdict: Verdict) -> list[str]:
    """Say what held back the clocks of each side, where heat or a power brake did, or where the sides differ in it."""
    one, other = verdict.held_back
    reasons = _notable(verdict)
    if not reasons:
        return []
    shares = ", ".join(
        f"{reason} in {units.percent(one.get(reason, 0.0), 0)} of the readings of {verdict.baseline} and "
        f"{units.percent(other.get(reason, 0.0), 0)} of {verdict.candidate}"
        for reason in reasons
    )
    return [f"Clocks were held back: {shares}."]


def _notable(verdict: Verdict) -> list[str]:
    one, other = verdict.held_back
    return [
        reason
        for reason in sorted({*one, *other})
        if (of_machine(reason) and max(one.get(reason, 0.0), other.get(reason, 0.0)) >= LEAST_HELD_BACK)
        or abs(one.get(reason, 0.0) - other.get(reason, 0.0)) >= NOTABLE_SHARE
    ]


def _clocks_of_many(groups: Sequence[Group], reasons: Collection[str]) -> list[str]:
    """Say in how many of its readings the least and the most affected configuration had each reason."""
    read = [held for group in groups if (held := group_held_back(group)) is not None]
    shares = {reason: [held.get(reason, 0.0) for held in read] for reason in sorted(reasons)}
    ends = {reason: dict.fromkeys(units.percent(end(seen), 0) for end in (min, max)) for reason, seen in shares.items()}
    parts = [f"{reason} in {' to '.join(shown)}" for reason, shown in ends.items()]
    return [f"Clocks were held back: {', '.join(parts)} of the readings, depending on the configuration."] if parts else []


def _values(found: Sequence[DifferingTrait]) -> str:
    """Return a trait's values in parentheses, of a list the names of the parts that differ; nothing where there is no room."""
    words = list(dict.fromkeys(words for one in found for words in one.words))
    if found[0].key in LISTS:
        parts = [part for text in words for part in text.removeprefix("without ").split(" and ")[0].split(", ")]
        words = [part.replace("=", " ").split(" ")[0] for part in parts]
    else:
        values = dict.fromkeys(value for one in found for value in (one.first, one.second))
        words = ["unknown" if value is None else str(value) for value in values]
    text = " | ".join(dict.fromkeys(words))
    return f" ({text})" if len(text) <= LONGEST_VALUES else ""


def sides(verdict: Verdict) -> str:
    """Name every trait in which the sides of a verdict differ: the candidate's against the baseline's."""
    return " ".join([*lines_of_sides(verdict.traits, (1, 0), verdict.question.varying), *clock_words(verdict)])


def lines_of_sides(traits: Sequence[DifferingTrait], order: tuple[int, int], varying: Collection[str] = ()) -> list[str]:
    """Name the traits of two sides, those that are the question first, in an order of sides: (0, 1), or (1, 0) for the second.

    Traits that forbid a comparison are left out, except where they are the question.
    """
    free = [one for one in traits if one.effect != "refuse"]
    refused = any(one.effect == "refuse" for one in traits)
    lines = []
    for before, shown in (
        ("Varied", [one for one in free if one.key in varying]),
        (
            "Also different" if refused else "What differs",
            [one for one in free if one.key not in varying and one.effect == "list"],
        ),
        ("Caution, also different", [one for one in free if one.effect == "warn"]),
    ):
        if shown:
            sides = (", ".join(trait.words[side] for trait in shown) for side in order)
            one, other = (f"({words})" if len(shown) > 1 else words for words in sides)
            lines.append(f"{before}: {one} against {other}.")
    return lines


def headline(ranking: Ranking) -> list[str]:
    """Name the winner, its lead with the interval, and what is not shown to be slower; of a single one the mean of its runs."""
    names, best = short_names(ranking.groups), ranking.best
    if ranking.lead is None:
        return _alone(best)
    first, second = names[id(best)], names[id(ranking.groups[1])]
    lead = ranking.lead.ratio
    tied = [names[id(group)] for group in ranking.tied if group is not ranking.groups[1]]
    if lead is None or lead.low is None or lead.high is None:
        return [f"{first} leads {second} by {gain(lead)}; single steps have no interval"]
    ahead = "ahead of" if lead.value < 2 else "as fast as"
    rest = f"{gain(lead)} {ahead} the next, {second}"
    if proven(ranking):
        return [f"{first} is fastest: {rest}{_within_noise(tied)}{although(ranking.lead)}"]
    if ranking.lead.outcome == "held back":
        return [f"{first} ran fastest: {rest}{_within_noise(tied)}; no winner, since {held_words(ranking.lead, second)}"]
    if ranking.lead.other_loss is not None:
        return [f"{first} ran fastest: {rest}{_within_noise(tied)}", loss_words(ranking.lead)]
    if ranking.lead.outcome == "these runs differ":
        return [f"{first} ran fastest: {rest}{_within_noise(tied)}; too few runs to call it the winner"]
    return [f"No winner: {first} leads, and {second} is within noise ({gain(lead)}){_within_noise(tied)}"]


def held_words(verdict: Verdict, name: str) -> str:
    """Say what the machine held back on the handicapped side of a verdict; empty where neither is."""
    if verdict.handicapped is None:
        return ""
    shares = verdict.held_back[verdict.handicapped == "candidate"]
    causes = [f"{reason} in {units.percent(share, 0)} of its readings" for reason, share in shares.items() if of_machine(reason)]
    return f"the clocks of {name} were held back: {', '.join(causes)}"


def although(verdict: Verdict) -> str:
    """Say that the faster side's clocks were held back, where they were."""
    faster = "candidate" if verdict.ratio is not None and verdict.ratio.value > 1 else "baseline"
    name = verdict.candidate if faster == "candidate" else verdict.baseline
    return f", although {held_words(verdict, name)}" if verdict.handicapped == faster else ""


def loss_words(verdict: Verdict) -> str:
    """Say by how much the losses of two sides differ on the same data; empty where nothing shows that they do."""
    if verdict.other_loss is None:
        return ""
    value = verdict.other_loss.difference.value
    size = "is not a number" if value == float("inf") else f"differs by {units.signed_percent(value)}"
    found = verdict.other_loss
    seeds = "on the same data and seed" if found.paired else f"on the same data, over {found.seeds} seeds or more per side,"
    first, last = found.steps
    return f"No win: {seeds} the loss {size} (steps {first} to {last})."


def _within_noise(names: Sequence[str]) -> str:
    return f"; {len(names)} within noise: {few(names, MOST_TIED)}" if names else ""


def _alone(group: Group) -> list[str]:
    rate, runs = TOKENS.of_group(group), len(group.runs)
    if runs == 1 or rate is None:
        return []
    spread = spread_between_runs(group)
    differ = "" if spread is None else f"; the runs differ by {units.percent(spread, 2)} (standard deviation)"
    mean = f"{with_interval(rate, TOKENS.show)} {heading_of(TOKENS, [group])}"
    return [f"{mean}: mean of {runs} runs, 95 % interval between runs{differ}"]


def gain(ratio: Estimate | None) -> str:
    """Format how much faster: '8.4 % [8.1, 8.7]', or '12.5 times [7.4, 21.0]' from 2 on."""
    if ratio is None:
        return units.ABSENT
    numbers = [value for value in (ratio.value, ratio.low, ratio.high) if value is not None]
    unit, texts = " %", [f"{(value - 1) * 100:,.1f}" for value in numbers]
    if ratio.value >= 2:
        unit, texts = " times", [f"{value:,.2f}" for value in numbers]
    if shows_nothing(ratio):
        return f"{texts[0]}{unit}, {TOO_FEW}"
    return f"{texts[0]}{unit} [{texts[1]}, {texts[2]}]" if len(texts) == 3 else f"{texts[0]}{unit}"


def vs_fastest(ranking: Ranking, position: int) -> str:
    """Return the cell of one group: how much slower than the fastest, or that this is not shown."""
    if position == 0:
        return Painted("fastest", "winner") if proven(ranking) else "first"
    found = ranking.against_best[position]
    if found is None or found.ratio is None:
        return units.ABSENT
    change = units.signed_percent(found.ratio.value - 1)
    if found.ratio.low is None:
        return f"{change} (n = 1)"  # single steps have no interval, so nothing tells noise from a difference
    return f"{change}, noise" if found.outcome == "no difference shown" else change


def apart(earlier: Sequence[Ranking], ranking: Ranking) -> list[str]:
    """Say in which traits a workload differs from the nearest one above of the same model, so that no speed is compared.

    Of models it is said once, below the heading of the second one.
    """
    run, varying = ranking.best.run, ranking.question.varying
    models = [(other.best.run.model, other.best.run.size) for other in earlier]
    alike = [other for other, model in zip(earlier, models, strict=True) if model == (run.model, run.size)]
    same = earlier if "model" in varying else alike
    if not same:
        return [UNLIKE_MODELS] if len({*models}) == 1 else []
    nearest = min(same, key=lambda other: len(comparable(other.best.run, run, varying)))
    words = "; ".join(difference(entry) for entry in comparable(nearest.best.run, run, varying))
    which = "the workload above" if nearest is earlier[-1] else f"{heading(nearest)} above"
    return [f"Not compared with {which}, because they differ: {words}. {ANYWAY}"]


def difference(entry: DifferingTrait) -> str:
    """Put a difference into words: the candidate's value against the baseline's."""
    if entry.first is None and entry.second is None:
        return f"{entry.name} not recorded in either"
    first, second = ("not recorded" if value is None else _side(value) for value in (entry.first, entry.second))
    return f"{second} against {first}" if entry.name == PROCESSES else f"{entry.name} {second} against {first}"


def _side(value: object) -> str:
    if isinstance(value, int):
        return units.count(value)
    return getattr(value, "name", None) or str(value)


def caveats(groups: Sequence[Group], warnings: Mapping[str, Sequence[str]], question: Question = QUESTION) -> list[str]:
    """Return what a reader must know about the numbers, each said once; `warnings` with the runs that they apply to."""
    cpu = [group for group in groups if group.run.machine.platform == "cpu"]
    lines = [CPU_CAUTION] if cpu else []
    unit = per_rank("GPU", (group.run.machine.platform for group in groups))
    lines.append(f"Throughput is per {unit}, with its 95 % interval: {_interval_words(groups)}.")
    if any(is_vague(found) for group in groups if (found := TOKENS.of_group(group)) is not None):
        lines[-1] += " A rate with n alone has too few steps or runs, or too unlike ones, for an interval of use."
    judged = [
        found for ranking in rankings(groups, question) for found in (*ranking.against_best, ranking.lead) if found is not None
    ]
    weakest = min(judged, key=lambda found: found.fewest_runs, default=None)
    if weakest is not None and "fewer" in weakest.evidence:
        lines.append(f"The weakest comparison here has {weakest.evidence}. Repeat with --runs 3.")
    silent = dict.fromkeys(name for found in judged for name in found.unrecorded)
    if silent:
        lines.append(f"Not recorded on either side of a comparison, and so not known to be equal: {', '.join(silent)}.")
    lines += open_losses(judged)
    ends = sorted({item.result.steps[-1].step for group in groups for item in group.runs if item.result.steps})
    if judged and len(ends) > 1:
        lines.append(f"Losses in the table are those after {ends[0]} to {ends[-1]} steps, and so do not compare.")
    believed = [group.label for group in groups if grade_of(group.run, "matmul_dtype") == "stated"]
    if believed:
        lines.append(f"The dtype is stated, not observed: {_places(believed, 'configurations')}.")
    if question.confidence > QUESTION.confidence:
        share = units.percent(question.confidence)
        lines.append(f"Intervals of leads and ratios are of {share}, since the comparison is looked at several times.")
    spreads = [(spread, len(group.runs)) for group in groups if (spread := spread_between_runs(group)) is not None]
    if spreads and len(groups) > 1:
        low, high = min(spreads)[0], max(spreads)[0]
        runs = _range([str(number) for _, number in spreads])
        lines.append(f"Repeated runs differ by {_range([units.percent(low, 2), units.percent(high, 2)])} ({runs} runs each).")
    return lines + _with_places(warnings)


MOST_REASONS = 2
"""Why losses were not compared; further reasons are counted."""


def open_losses(judged: Sequence[Verdict]) -> list[str]:
    """Say of which comparisons it is not shown that both sides reach the same losses, and why; once for each pair."""
    pairs = {frozenset((found.baseline, found.candidate)): found for found in judged if found.losses_open}
    reasons = list(dict.fromkeys(found.losses_open for found in pairs.values()))
    if not reasons:
        return []
    rest = f"; and {len(reasons) - MOST_REASONS} more reasons" if len(reasons) > MOST_REASONS else ""
    return [f"Speed alone: {'; '.join(reasons[:MOST_REASONS])}{rest}."]


def _interval_words(groups: Sequence[Group]) -> str:
    several = [len(group.runs) > 1 for group in groups]
    if all(several):
        return "between runs"
    return "between runs where there are several, else between the steps of one run" if any(several) else "between steps"


def _with_places(warnings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each warning with the runs or configurations that it applies to."""
    nouns = ("runs", "configurations")
    return [f"{text.rstrip('.')}: {_places(places, nouns[text.startswith('No MFU')])}" for text, places in warnings.items()]


def _range(values: Sequence[str]) -> str:
    """Return '3', or '1 to 3', of numbers as text."""

    def size(text: str) -> float:
        return float(re.sub(r"[^\d.+-]", "", text))

    low, high = min(values, key=size), max(values, key=size)
    return low if size(low) == size(high) else f"{low} to {high}"


def _places(places: Sequence[str], noun: str) -> str:
    named = list(dict.fromkeys(places))
    return ", ".join(named) if len(named) <= MOST_NAMED else f"{len(places)} {noun}"
