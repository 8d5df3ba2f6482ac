"""Sentences about results: who leads and how surely, in what sides differ, and what a reader must know."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tprimat.analyze.compare import LEAST_HELD_BACK, QUESTION, Ranking, Verdict, comparable
from tprimat.analyze.findings import Shared
from tprimat.analyze.groups import Group, group_held_back, spread_between_runs
from tprimat.analyze.metrics import of_machine
from tprimat.analyze.traits import TRAITS, DifferingTrait
from tprimat.core import units
from tprimat.core.statistics import FEWEST_RUNS
from tprimat.records.evidence import grade_of
from tprimat.records.schema import Estimate, Finding
from tprimat.report.catalogue import CPU_CAUTION, TOKENS, heading_of, per_rank
from tprimat.report.names import heading, short_names
from tprimat.report.tables import TOO_FEW, is_vague, shows_nothing, with_interval

MOST_NAMED = 2
"""Runs that a note names; more are counted."""
LONGEST_VALUES = 60
"""Letters of a trait's values; longer ones are in the table or in the records."""
ANYWAY = "(--even-if-different compares anyway.)"
UNLIKE_MODELS = f"Different models are not compared with each other: a token is not the same work. {ANYWAY}"


def proven(ranking: Ranking) -> bool:
    """Return whether enough runs show that the first is faster than the second."""
    return ranking.lead is not None and ranking.lead.outcome == "faster"


def headline(ranking: Ranking) -> list[str]:
    """Name the winner, its lead with the interval, and what is not shown to be slower; of a single one the mean of its runs."""
    names, best = short_names(ranking.groups), ranking.best
    if ranking.lead is None:
        return _alone(best)
    first, second = names[id(best)], names[id(ranking.groups[1])]
    lead = ranking.lead.ratio
    others = sum(group is not ranking.groups[1] for group in ranking.tied)
    tied = f"; {others} more within noise" if others else ""
    if lead is None or lead.low is None or lead.high is None:
        return [f"{first} leads {second} by {gain(lead)}; single steps have no interval"]
    ahead = "ahead of" if lead.value < 2 else "as fast as"
    rest = f"{gain(lead)} {ahead} the next, {second}"
    if proven(ranking):
        return [f"{first} is fastest: {rest}{tied}{although(ranking.lead)}"]
    if ranking.lead.outcome == "held back":
        return [f"{first} ran fastest: {rest}{tied}; no winner, since {held_words(ranking.lead, second)}"]
    if ranking.lead.other_loss is not None:
        return [f"{first} ran fastest: {rest}{tied}", loss_words(ranking.lead)]
    if ranking.lead.outcome == "these runs differ":
        return [f"{first} ran fastest: {rest}{tied}; too few runs to call it the winner"]
    return [f"No winner: {first} leads, and {second} is within noise ({gain(lead)}){tied}"]


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
    check = verdict.other_loss
    seeds = "on the same data and seed" if check.paired else f"on the same data, over {check.seeds} seeds or more per side,"
    first, last = check.steps
    return f"No win: {seeds} the loss {size} (steps {first} to {last})."


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


def differing(ranking: Ranking) -> list[str]:
    """Say in which traits the configurations of a ranking differ, and which of them may not matter; of two, both sides."""
    judged = [verdict for verdict in ranking.against_best if verdict is not None]
    if len(judged) == 1:
        return [*lines_of_sides(judged[0].traits, (0, 1), ranking.question.varying), *clock_words(judged[0])]
    reasons = {reason for verdict in judged for reason in _notable(verdict)}
    return [*differing_traits(judged, ranking.question.varying), *_clocks_of_many(ranking.groups, reasons)]


def differing_traits(judged: Sequence[Verdict], varying: Collection[str] = ()) -> list[str]:
    """Name the traits in which the sides of some verdicts differ, with their values."""
    traits = [one for verdict in judged for one in verdict.traits]
    warned = {one.key for one in traits if one.effect == "warn"}
    differ = [key for key in TRAITS if key in {one.key for one in traits}]
    lines = []
    for before, keys in (
        ("Varied", [key for key in differ if key in varying]),
        ("They differ in", [key for key in differ if key not in {*varying, *warned}]),
        ("Caution, they also differ in", [key for key in differ if key in warned - set(varying)]),
    ):
        if keys:
            shown = [TRAITS[key].name + _values([one for one in traits if one.key == key]) for key in keys]
            lines.append(f"{before} {', '.join(shown)}.")
    return lines


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


def _values(traits: Sequence[DifferingTrait]) -> str:
    """Return a trait's values in parentheses; nothing where there is no room."""
    text = values_in_words(traits[0].name, [word for one in traits for word in one.words])
    return f" ({text})" if len(text) <= LONGEST_VALUES else ""


def values_in_words(name: str, words: Iterable[str]) -> str:
    """Return the values of a trait, each once, without its name: '4 | 1'."""
    return " | ".join(_bare(name, word) for word in dict.fromkeys(words))


def _bare(name: str, word: str) -> str:
    return word.removeprefix(f"{name} ").removesuffix(f" {name}")


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
    baseline, candidate = (_bare(entry.name, word) for word in entry.words)
    return f"{entry.name} {candidate}" + ("" if candidate == baseline else f" against {baseline}")


def caveats(rankings: Sequence[Ranking], findings: Sequence[Shared] = ()) -> list[str]:
    """Return what a reader must know about the numbers, each said once, then what there is to say about runs."""
    if not rankings:
        return []
    groups, question = [group for ranking in rankings for group in ranking.groups], rankings[0].question
    cpu = [group for group in groups if group.run.machine.platform == "cpu"]
    lines = [CPU_CAUTION] if cpu else []
    unit = per_rank("GPU", (group.run.machine.platform for group in groups))
    lines.append(f"Throughput is per {unit}, with its 95 % interval: {_interval_words(groups)}.")
    if any(is_vague(rate) for group in groups if (rate := TOKENS.of_group(group)) is not None):
        lines[-1] += " A rate with n alone has too few steps or runs, or too unlike ones, for an interval of use."
    judged = [one for ranking in rankings for one in (*ranking.against_best, ranking.lead) if one is not None]
    weakest = min(judged, key=lambda verdict: verdict.fewest_runs, default=None)
    if weakest is not None and weakest.fewest_runs < FEWEST_RUNS:
        lines.append(f"The weakest comparison here has {weakest.evidence}. Repeat with --runs 3.")
    silent = dict.fromkeys(name for verdict in judged for name in verdict.unrecorded)
    if silent:
        lines.append(f"Unrecorded on both sides of a comparison, so unchecked: {', '.join(silent)}.")
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
        shares = [units.percent(end(spread for spread, _ in spreads), 2) for end in (min, max)]
        runs = [str(end(number for _, number in spreads)) for end in (min, max)]
        lines.append(f"Repeated runs differ by {_range(shares)} ({_range(runs)} runs each).")
    return lines + told(findings)


MOST_REASONS = 2
"""Why losses were not compared; further reasons are counted."""


def open_losses(judged: Sequence[Verdict]) -> list[str]:
    """Say of which comparisons it is not shown that both sides reach the same losses, and why; once for each pair."""
    pairs = {frozenset((verdict.baseline, verdict.candidate)): verdict for verdict in judged if verdict.losses_open}
    reasons = list(dict.fromkeys(verdict.losses_open for verdict in pairs.values()))
    if not reasons:
        return []
    rest = f"; and {len(reasons) - MOST_REASONS} more reasons" if len(reasons) > MOST_REASONS else ""
    return [f"Speed alone: {'; '.join(reasons[:MOST_REASONS])}{rest}."]


def _interval_words(groups: Sequence[Group]) -> str:
    several = [len(group.runs) > 1 for group in groups]
    if all(several):
        return "between runs"
    return "between runs where there are several, else between the steps of one run" if any(several) else "between steps"


def _whole_percent(value: float) -> str:
    return units.percent(value, 0)


FINDINGS: Mapping[str, tuple[str, tuple[Callable[[float], str], ...]]] = {
    "no MFU": ("no MFU, since {}", ()),
    "few steps": ("only {} steady steps; 10 or more make an interval trustworthy", (units.count,)),
    "drift": ("step time drifts by {} over the steady steps (Mann-Kendall, p < 0.05)", (units.signed_percent,)),
    "outliers": (
        "outliers (3 scaled MAD): {} of {} steady steps; throughput includes them, its interval may be too narrow",
        (units.count, units.count),
    ),
    "not finite": (
        "{} of {} steady steps have a skipped update, or a loss or norm that is not finite",
        (units.count, units.count),
    ),
    "two speeds": (
        "bimodal step times: {} take {}, the others {}; no interval. Check the clocks, and run longer",
        (_whole_percent, units.seconds, units.seconds),
    ),
    "caution": ("{}", ()),
    "memory of graphs": ("memory is what torch reserved: what CUDA graphs hold does not count as allocated", ()),
    "framework's clock": ("step times are the framework's own, not measured at the end of each step", ()),
    "unlike variable": ("{0} is {1} on node 0, and {2} on node {4} ({3})", (units.count,)),
    "straggler": ("{} takes {} longer than its peers, which wait", (units.percent,)),
    "clocks": ("clocks were held back in {1} of the readings: {0}", (_whole_percent,)),
    "energy of other steps": ("energy absent: the file states it of other steps", ()),
    "energy of profiled steps": ("energy absent: profiled steps lie between the steady ones", ()),
    "no ends of steps": ("energy absent: the steps do not say when they ended", ()),
    "power of few GPUs": ("energy absent: power was read on {} of {} GPUs", (units.count, units.count)),
    "gaps in power": ("energy absent: power readings of {} of {} GPUs do not span the steady steps", (units.count, units.count)),
    "probes": ("{}", ()),
}
"""A finding's sentence, with its subjects and then its numbers; and how each number is shown."""


def finding_words(found: Finding | Shared) -> str:
    """Put a finding into words: of several runs the least and the largest of each number."""
    template, shows = FINDINGS[found.kind]
    least, most = (found.numbers, found.numbers) if isinstance(found, Finding) else (found.least, found.most)
    ends = [(show(low), show(high)) for show, low, high in zip(shows, least, most, strict=True)]
    numbers = [high if low == high else f"{low.removesuffix(' %')} to {high}" for low, high in ends]
    return template.format(*found.subjects, *numbers).rstrip(".")


def told(shared: Sequence[Shared]) -> list[str]:
    """Put findings into a line each, with what they are about."""
    lines = []
    for one in shared:
        text = finding_words(one)
        lines.append(f"{text[:1].upper()}{text[1:]}: {_places(one.places, 'configurations' if one.kind == 'no MFU' else 'runs')}")
    return lines


def _range(ends: Sequence[str]) -> str:
    """Return '3', or '1 to 3', of the least and the largest number."""
    return " to ".join(dict.fromkeys(ends))


def _places(places: Sequence[str], noun: str) -> str:
    named = list(dict.fromkeys(places))
    return ", ".join(named) if len(named) <= MOST_NAMED else f"{len(places)} {noun}"


def sentence(verdict: Verdict) -> str:
    """Put a verdict into words."""
    pair = f"{verdict.candidate} against {verdict.baseline}"
    differing = "; ".join(difference(entry) for entry in verdict.differences)
    if verdict.outcome == "refused" or verdict.ratio is None:
        reason = differing or "tokens or GPUs of a run are not recorded"
        return f"Not compared: {pair}, because they differ: {reason}. {ANYWAY}"
    ratio = f"ratio {verdict.ratio.value:.3f}"
    if shows_nothing(verdict.ratio):
        ratio += f", {TOO_FEW}"
    elif verdict.ratio.low is not None and verdict.ratio.high is not None:
        ratio += f", {units.percent(verdict.question.confidence, 0)} interval {verdict.ratio.low:.3f} to {verdict.ratio.high:.3f}"
    else:
        ratio += ", no interval from a single step"
    what = verdict.outcome if verdict.outcome == "no difference shown" else change(verdict.ratio.value)
    if verdict.outcome == "these runs differ":
        word = "faster" if verdict.ratio.value > 1 else "slower"
        what = f"{change(verdict.ratio.value)} in these runs, too few to call it {word}"
    if verdict.outcome == "held back":
        slower = verdict.baseline if verdict.ratio.value > 1 else verdict.candidate
        what = f"ran {what}, and no winner, since {held_words(verdict, slower)}"
    elif verdict.outcome in {"faster", "slower", "these runs differ"}:
        what += although(verdict)
    caution = f" They differ: {differing}." if differing else ""
    caution += f" {loss_words(verdict)}" if verdict.other_loss else ""
    speed_alone = f"Speed alone: {verdict.losses_open}." if verdict.losses_open else ""
    rest = " ".join(filter(None, (sides(verdict), speed_alone)))
    return f"{pair}: {what} ({ratio}; {verdict.evidence}).{caution}{f' {rest}' if rest else ''}"


def runs_to_decide(verdict: Verdict, margin: float) -> str:
    """Say what would decide whether a candidate is within a margin of its baseline."""
    more = verdict.runs_to_pass(margin)
    if more is None:
        return f"Undecided at a margin of {units.percent(margin)}; no number of runs would show it to be within, at this ratio."
    return f"Undecided at a margin of {units.percent(margin)}: {more} runs per side would show it to be within, at this ratio."


def change(ratio: float) -> str:
    """Put a ratio of speeds into words: '12.0 % faster', '3.0 % slower', '2.50 times as fast' from 2 on."""
    if ratio >= 2:
        return f"{units.significant(ratio)} times as fast"
    return f"{units.percent(abs(ratio - 1))} {'faster' if ratio > 1 else 'slower'}"
