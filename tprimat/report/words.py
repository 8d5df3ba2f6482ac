"""Sentences about results: who leads and how surely, in what sides differ, and what a reader must know."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tprimat.analyze.compare import LEAST_HELD_BACK, Ranking, Verdict, comparable, throughput
from tprimat.analyze.groups import Measured, Shared, each_once, on_cpu
from tprimat.analyze.metrics import of_machine
from tprimat.analyze.traits import TRAITS, DifferingTrait, engine_words, few, machine_name, model_name
from tprimat.core import units
from tprimat.core.accelerators import peak_flops
from tprimat.core.rows import DATA, document
from tprimat.core.statistics import FEWEST_RUNS, more_runs
from tprimat.records.evidence import grade_of
from tprimat.records.schema import Estimate, Finding, RunMetrics, Window
from tprimat.records.sharing import masked_name, without_secrets
from tprimat.report.catalogue import CPU_CAUTION, MFU, per_rank
from tprimat.report.names import RankedWorkload, heading, short_names
from tprimat.report.tables import TOO_FEW, plural, shows_nothing

MOST_NAMED = 2
"""Runs that a note names; more are counted."""
LONGEST_VALUES, LONGEST_OF_ALL = 60, 120
"""Letters of a trait's values, and of all in a sentence; longer ones are in the table or in the records."""
NOTABLE_SHARE = 0.1
"""Difference of the shares of readings with clocks held back, from which two sides are said to differ."""
MOST_REASONS = 2
"""Why losses were not compared; further reasons are counted."""
ANYWAY = "(--even-if-different compares anyway.)"


# Who leads.


def headline(ranking: Ranking) -> list[str]:
    """Name the winner, its lead with the interval, and how many are not shown to be slower; empty for one configuration."""
    names, best = short_names(ranking.groups), ranking.best
    if ranking.lead is None or ranking.second is None:
        return []
    first, second = names[id(best)], names[id(ranking.second)]
    lead, outcome = ranking.lead.ratio, ranking.lead.outcome
    others = sum(group is not ranking.second for group in ranking.tied)
    tied = f"; {others} more within noise" if others else ""
    if lead is None or lead.low is None or lead.high is None:
        return [f"{first} leads {second} by {gain(lead)}; single steps have no interval"]
    if outcome == "no difference shown":
        return [f"No winner: {first} leads, and {second} is within noise ({gain(lead)}){tied}"]
    verb = "is" if outcome == "faster" else "ran"
    text = f"{first} {verb} fastest: {gain(lead)} {'ahead of' if lead.value < 2 else 'as fast as'} the next, {second}{tied}"
    if outcome == "other loss":
        return [text, loss_words(ranking.lead)]
    if outcome == "these runs differ":
        return [f"{text}; too few runs to call it the winner"]
    return [text + but(ranking.lead, faster=first, slower=second)]


def gain(ratio: Estimate | None) -> str:
    """Format how much faster: '8.4 % [8.1, 8.7]', or '12.5 times [7.4, 21.0]' from 2 on."""
    if ratio is None:
        return units.ABSENT
    unit = " times" if ratio.value >= 2 else " %"
    value, low, high = (
        "" if end is None else f"{end:,.2f}" if ratio.value >= 2 else f"{(end - 1) * 100:,.1f}"
        for end in (ratio.value, ratio.low, ratio.high)
    )
    interval = f", {TOO_FEW}" if shows_nothing(ratio) else f" [{low}, {high}]" if low and high else ""
    return value + unit + interval


def held_words(verdict: Verdict, name: str) -> str:
    """Say what the machine held back on the handicapped side of a verdict; empty where neither is."""
    if verdict.handicapped is None:
        return ""
    shares = verdict.held_back[verdict.handicapped == "candidate"]
    causes = [
        f"{reason} in {units.percent(share, 0)} of its readings" for reason, share in shares.items() if of_machine(reason, share)
    ]
    return f"the clocks of {name} were held back: {', '.join(causes)}"


def but(verdict: Verdict, faster: str, slower: str) -> str:
    """Say why the faster side does not win, or that it does although its clocks were held back; of sides by their names."""
    if verdict.outcome == "held back":
        return f"; no winner, because {held_words(verdict, slower)}"
    if verdict.outcome == "losses missing":
        return f"; no winner: {faster} lacks losses, which {slower} recorded"
    ahead = "candidate" if verdict.ratio is not None and verdict.ratio.value > 1 else "baseline"
    return f", although {held_words(verdict, faster)}" if verdict.handicapped == ahead else ""


def loss_words(verdict: Verdict) -> str:
    """Say by how much the losses of two sides differ on the same data; empty where nothing shows that they do."""
    if verdict.other_loss is None:
        return ""
    value, (first, last) = verdict.other_loss.difference.value, verdict.other_loss.steps
    size = "is not a number" if value == float("inf") else f"differs by {units.signed_percent(value)}"
    where = "on the same data and seed" if verdict.other_loss.paired else "seeds aside,"
    return f"No win: {where} the loss {size} (steps {first} to {last})."


# In what sides differ.


def differing(ranking: Ranking) -> list[str]:
    """Say in which traits the configurations of a ranking differ."""
    judged = [verdict for verdict in ranking.against_best if verdict is not None]
    return differing_traits(judged, ranking.question.varying)


def differing_traits(judged: Sequence[Verdict], varying: Collection[str] = ()) -> list[str]:
    """Name the traits in which the sides of some verdicts differ, with their values; not those that forbid the comparison.

    The baseline's value comes first, or that of the fastest.
    """
    traits = [one for verdict in judged for one in verdict.traits if one.effect != "refuse"]
    warned = {one.key for one in traits if one.effect == "warn"}
    differ = [key for key in TRAITS if key in {one.key for one in traits}]
    lines = []
    for before, keys in (
        ("Varied", [key for key in differ if key in varying]),
        ("They differ in", [key for key in differ if key not in {*varying, *warned}]),
        ("Caution, they also differ in", [key for key in differ if key in warned - set(varying)]),
    ):
        if keys:
            words = {key: [word for one in traits if one.key == key for word in one.words] for key in keys}
            texts = {key: values_in_words(TRAITS[key].name, words[key]) for key in keys}
            values = {key: f" ({text})" if len(text) <= LONGEST_VALUES else "" for key, text in texts.items()}
            while sum(map(len, values.values())) > LONGEST_OF_ALL:
                values[max(values, key=lambda key: len(values[key]))] = ""
            lines.append(f"{before} {', '.join(TRAITS[key].name + text for key, text in values.items())}.")
    folders = [verdict.folders for verdict in judged if len({*verdict.folders}) > 1 and not _recorded_apart(verdict)]
    if folders:
        names = " | ".join(dict.fromkeys(folder for pair in folders for folder in pair))
        which = "Some differ in the folder only" if lines else "Only the folders differ"
        lines.append(f"{which}, as far as recorded ({names}).")
    return lines


def _recorded_apart(verdict: Verdict) -> bool:
    """Return whether the records of two sides differ: in a trait, in clocks, in losses, or in what makes losses differ."""
    why = verdict.losses_open
    unlike = why is not None and why.kind == "unlike losses" and why.subjects[1] != why.subjects[2]
    return bool(verdict.traits or clock_words(verdict.held_back) or verdict.other_loss or unlike)


def clock_words(held: Sequence[Mapping[str, float]]) -> list[str]:
    """Say in how many readings the clocks were held back, where heat or a power brake did, or where the sides differ in it."""
    shares = {reason: [one.get(reason, 0.0) for one in held] for reason in sorted({reason for one in held for reason in one})}
    parts = [
        f"{reason} in {' to '.join(dict.fromkeys(units.percent(end(seen), 0) for end in (min, max)))}"
        for reason, seen in shares.items()
        if max(seen) - min(seen) >= NOTABLE_SHARE or (max(seen) >= LEAST_HELD_BACK and of_machine(reason, max(seen)))
    ]
    return [f"Clocks were held back: {', '.join(parts)} of the readings."] if parts else []


def values_in_words(name: str, words: Iterable[str]) -> str:
    """Return the values of a trait, each once, without its name: '4 | 1'."""
    return " | ".join(_bare(name, word) for word in dict.fromkeys(words))


def _bare(name: str, word: str) -> str:
    return word.removeprefix(f"{name} ").removesuffix(f" {name}")


def apart(earlier: Sequence[Ranking], ranking: Ranking) -> list[str]:
    """Say in which traits a workload differs from the nearest one above of the same model, so that no speed is compared.

    For models it is said once, below the heading of the second one.
    """
    run, varying = ranking.best.run, ranking.question.varying
    models = [(other.best.run.model, other.best.run.size) for other in earlier]
    alike = [other for other, model in zip(earlier, models, strict=True) if model == (run.model, run.size)]
    same = earlier if "model" in varying else alike
    anyway = f" {ANYWAY}" if len(earlier) == 1 else ""
    if not same:
        return [f"Different models are not compared: a token is not the same work in each.{anyway}"] * (len({*models}) == 1)
    nearest = min(same, key=lambda other: len(comparable(other.best.run, run, varying)))
    words = "; ".join(difference(entry) for entry in comparable(nearest.best.run, run, varying))
    which = "the workload above" if nearest is earlier[-1] else f"{heading(nearest)} above"
    return [f"Not compared with {which}: {words}.{anyway}"]


def difference(entry: DifferingTrait) -> str:
    """Put a difference into words: the candidate's value against the baseline's."""
    baseline, candidate = (_bare(entry.name, word) for word in entry.words)
    return f"{entry.name} {candidate}" + ("" if candidate == baseline else f" against {baseline}")


# One verdict.


def sentence(verdict: Verdict, *, brief: bool = False) -> str:
    """Put a verdict into words; in brief without what differs beside it, where that is said already."""
    pair, ratio = f"{verdict.candidate} against {verdict.baseline}", verdict.ratio
    apart = "; ".join(difference(entry) for entry in verdict.differences)
    if verdict.outcome == "refused" or ratio is None:
        reason = f"they differ: {apart}" if apart else "tokens or GPUs of a run are not recorded"
        return f"Not compared: {pair}, because {reason}. {ANYWAY}"
    interval = f"95 % interval {ratio.low:.3f} to {ratio.high:.3f}" if ratio.low and ratio.high else "no interval"
    number = f"ratio {ratio.value:.3f}, {TOO_FEW if shows_nothing(ratio) else interval}"
    what = verdict.outcome if verdict.outcome == "no difference shown" else change(ratio.value)
    if verdict.outcome == "these runs differ":
        what += f" in these runs, too few to call it {'faster' if ratio.value > 1 else 'slower'}"
    if verdict.outcome in {"held back", "losses missing"}:
        what = f"ran {what}"
    if verdict.outcome not in {"other loss", "no difference shown"}:
        slower, faster = (verdict.baseline, verdict.candidate)[:: 1 if ratio.value > 1 else -1]
        what += but(verdict, faster, slower)
    more = [f"They differ: {apart}." if apart and not brief else "", loss_words(verdict)]
    if not brief:
        more += [*differing_traits([verdict], verdict.question.varying), *clock_words(verdict.held_back), *open_losses([verdict])]
    return " ".join(filter(None, (f"{pair}: {what} ({number}; {evidence_words(verdict)}).", *more)))


def evidence_words(verdict: Verdict) -> str:
    """Say how many repeated runs are behind a verdict, and what single ones are assumed to vary by."""
    baseline, candidate = verdict.runs
    runs = "one run each" if baseline == candidate == 1 else f"{candidate} and {baseline} runs"
    if min(verdict.runs) >= FEWEST_RUNS:
        return runs
    assumed = f", and single runs are assumed to vary by {units.percent(verdict.assumed_spread)}" if 1 in verdict.runs else ""
    return f"{runs}: fewer than {FEWEST_RUNS} per side{assumed}"


def runs_to_decide(verdict: Verdict, margin: float) -> str:
    """Say what would decide whether a candidate is within a margin of its baseline."""
    more = None
    if verdict.ratio is not None and verdict.spreads is not None:
        more = more_runs(verdict.ratio.value, 1 - margin, min(verdict.runs), verdict.spreads)
    would = "no number of runs" if more is None else f"{more} runs per side"
    return f"Undecided at a margin of {units.percent(margin)}: at this ratio, {would} would show that it is within."


def change(ratio: float) -> str:
    """Put a ratio of speeds into words: '12.0 % faster', '3.0 % slower', '2.50 times as fast' from 2 on."""
    if ratio >= 2:
        return f"{units.significant(ratio)} times as fast"
    return f"{units.percent(abs(ratio - 1))} {'faster' if ratio > 1 else 'slower'}"


def open_losses(judged: Sequence[Verdict]) -> list[str]:
    """Say why it is not shown that compared sides reach the same losses."""
    reasons = list(dict.fromkeys(finding_words(verdict.losses_open) for verdict in judged if verdict.losses_open))
    rest = f"; and {plural(len(reasons) - MOST_REASONS, 'more reason')}" if len(reasons) > MOST_REASONS else ""
    return [f"Losses not proven equal: {'; '.join(reasons[:MOST_REASONS])}{rest}."] if reasons else []


# What a reader must know.


def caveats(rankings: Sequence[Ranking], findings: Sequence[Shared] = ()) -> list[str]:
    """Return what a reader must know about the numbers, each said once, then what there is to say about runs."""
    if not rankings:
        return []
    groups = [group for ranking in rankings for group in ranking.groups]
    platforms = {group.run.machine.platform for group in groups}
    several = {len(group.runs) > 1 for group in groups}
    mixed = "runs, or between the steps of a single run"
    between = mixed if len(several) > 1 else "runs" if True in several else "steps"
    lines = [CPU_CAUTION] if "cpu" in platforms else []
    lines.append(f"Throughput is per {per_rank('GPU', platforms)}, with a 95 % interval between {between}.")
    firsts = [(group.run, metrics) for group in groups if (metrics := group.runs[0].metrics)]
    convention = next((metrics.flops_convention for _, metrics in firsts), "causal")
    peaks = {(run.machine.accelerator, run.ran.matmul_dtype, one.peak_dense_flops) for run, one in firsts if one.mfu}
    sparse = any(peak != peak_flops(accelerator, dtype) for accelerator, dtype, peak in peaks)
    if sparse or convention != "causal":
        of_peak = f"; MFU is of the {'sparse' if sparse else 'dense'} peak" if peaks else ""
        lines.append(f"FLOP counted {convention}{of_peak}.")
    judged = [one for ranking in rankings for one in ranking.against_best if one is not None]
    weakest = min(judged, key=lambda one: (min(one.runs), -one.assumed_spread * (1 in one.runs), sum(one.runs)), default=None)
    if weakest is not None and min(weakest.runs) < FEWEST_RUNS:
        lines.append(f"The weakest comparison here has {evidence_words(weakest)}. Repeat with --runs 3.")
    listed = {trait.name for verdict in judged for trait in verdict.traits}
    if silent := dict.fromkeys(name for verdict in judged for name in verdict.unrecorded if name not in listed):
        lines.append(f"Recorded on neither side of a comparison, so not checked: {', '.join(silent)}.")
    for group in groups:  # the names of its folders, where it has several whose names are more than a number
        paths = [item.result.path.parent for item in group.runs]
        names = {(path.parent if path.name == "runs" else path).name for path in paths}
        if len(names) > 1 and not all(map(str.isdecimal, names)):
            folders = few(sorted(map(units.printable, names)), MOST_NAMED)
            lines.append(f"Folders that differ only in a number count as repetitions: {folders}.")
    lines += open_losses(judged)
    if believed := [group.label for group in groups if grade_of(group.run, "matmul_dtype") == "stated"]:
        lines.append(f"The dtype is stated, not observed: {_places(believed, 'configurations')}.")
    return lines + told(findings)


SHOWN: Mapping[str, Callable[[float], str]] = {
    "": units.count,
    "percent": units.percent,
    "share": lambda value: units.percent(value, 0),
    "signed": units.signed_percent,
    "seconds": units.seconds,
    "memory": units.gibibytes,
    "figure": units.significant,
    "tera": lambda value: f"{value / units.TERA:,.0f}",
    "digits": lambda value: f"{value:.4g}",
}
"""How a number of a finding is shown, by the name that stands in its sentence."""
FINDINGS: Mapping[str, str] = document(DATA / "findings.yaml")
"""A finding's sentence, with its subjects and then its numbers."""
TRUE_BUT_UNUSABLE = {"no end", "not completed", "not as asked", "no metrics", "copy", "diverged", "far loss"}
"""Kinds of findings for which a run does not count, though it may be what it says."""


@dataclass(frozen=True, slots=True)
class Span:
    """A number of a finding: of several runs the least and the largest."""

    low: float
    high: float

    def __format__(self, how: str) -> str:
        """Show both ends, by a name of SHOWN."""
        low, high = map(SHOWN[how], (self.low, self.high))
        return high if low == high else f"{low.removesuffix(' %')} to {high}"


def finding_words(finding: Finding | Shared) -> str:
    """Put a finding into words."""
    least, most = (finding.numbers, finding.numbers) if isinstance(finding, Finding) else (finding.least, finding.most)
    subjects = map(without_secrets, finding.subjects)
    return FINDINGS[finding.kind].format(*subjects, *map(Span, least, most)).rstrip(".")


def without_mfu(metrics: RunMetrics | None) -> str:
    """Say why a run has no MFU; empty if it has one."""
    absent = None if metrics is None else metrics.mfu_absent_because
    return "" if absent is None else finding_words(absent).removeprefix("no MFU, since ")


def rule_words(window: Window) -> str:
    """Say which steps do not count, and why."""
    if isinstance(window.rule, str):
        return window.rule
    parts = [f"{'step' if steps.isdecimal() else 'steps'} {steps}: {reason}" for reason, steps in window.rule.items()]
    return f"excluded {'; '.join(parts) or 'none'}"


def not_counted_words(item: Measured) -> str:
    """Say why a run does not count; empty if it does."""
    text = "; ".join(map(finding_words, item.not_counted))
    return text if item.counts or item.not_counted[0].kind in TRUE_BUT_UNUSABLE else f"this cannot be: {text}"


def not_counted_briefly(item: Measured) -> str:
    """Say it in few words: how the run ended, or what kind of finding it is."""
    finding = item.not_counted[0]
    return finding.subjects[0] if finding.kind == "not completed" else finding.kind


def lost_words(item: Measured) -> str:
    """Say why a candidate with a run that does not count passes no gate."""
    run = item.result.run
    what = " ".join(filter(None, (run_name(item), "of", model_name(run), run.strategy)))
    return f"{what} does not count: {not_counted_words(item)}. Repeat it, or move its record away."


def run_name(item: Measured) -> str:
    """Return the run's id, or the path of a file of another program, which has no id."""
    return units.printable(str(item.result.path)) if item.result.path.is_file() else masked_name(item.result.run.run_id)


def told(shared: Sequence[Shared]) -> list[str]:
    """Put findings into a line each, with what they are about."""
    texts = [
        (finding_words(one), _places(one.places, "configurations" if one.kind.startswith("no MFU") else "runs")) for one in shared
    ]
    return [f"{text[:1].upper()}{text[1:]}: {places}" for text, places in texts]


def _places(places: Sequence[str], noun: str) -> str:
    named = list(dict.fromkeys(places))
    return ", ".join(named) if len(named) <= MOST_NAMED else f"{len(places)} {noun}"


# A picture: a title with the finding, and what the runs were.


def picture_title(works: Sequence[RankedWorkload]) -> str:
    """Say who leads in the first workload; of a single configuration its speed, which a CPU does not show. Count the others."""
    work, more = works[0], f"; {plural(len(works) - 1, 'more workload')}" if len(works) > 1 else ""
    rate, gpus, share = throughput(work.ranking.best), work.ranking.best.run.machine.gpus, MFU.value(work.ranking.best)
    subject = work.title or model_name(work.ranking.best.run)
    if on_cpu(work.ranking.groups):
        return f"{subject} trains on {machine_name(work.ranking.best.run)}; a CPU does not show how fast it trains{more}"
    if work.ranking.lead is not None:
        return f"{work.title}: " * bool(work.title) + headline(work.ranking)[0] + more
    if rate is None or gpus is None:
        return f"{subject}: throughput not known{more}"
    part = f" ({units.percent(share)} of the dense peak)" if share is not None else ""
    return f"{subject} trains at {units.count(rate.value * gpus)} tokens/s on {machine_name(work.ranking.best.run)}{part}{more}"


def subtitle(works: Sequence[RankedWorkload]) -> str:
    """Return what ran, when, and how often."""
    groups = [one.group for work in works for one in work.configurations]
    if not (measured := each_once(groups).values()):
        return ""
    days = sorted({item.result.run.started_at[:10] for item in measured if item.result.run.started_at})
    steps = sum(item.metrics.window.steps for item in measured if item.metrics)
    parts = [
        heading(works[0].ranking) if len(works) == 1 else plural(len(works), "workload"),
        ", ".join(dict.fromkeys(engine_words(group.run) for group in groups)),
        " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
        plural(len(groups), "configuration"),
        plural(len(measured), "run"),
        f"n = {plural(steps, 'steady step')}",
        f"95 % intervals over {'runs where there are several' if len(measured) > len(groups) else 'steps'}",
    ]
    return " · ".join(filter(None, parts))


def judged_in(works: Sequence[RankedWorkload]) -> list[Verdict]:
    """Return the verdicts on the configurations of some workloads against the fastest of each."""
    return [verdict for work in works for verdict in work.ranking.against_best if verdict is not None]
