"""Words of a picture: a headline with the finding, a subtitle with what the runs were, labels that hold only what differs."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tprimat.analyze.compare import QUESTION, Question, Ranking, rankings, throughput
from tprimat.analyze.groups import Group, Measured, on_cpu
from tprimat.analyze.traits import (
    FORBIDDING,
    TRAITS,
    accelerator_name,
    dtype_that_ran,
    engine_words,
    few,
    layout,
    machine_name,
    model_and_shape,
    model_name,
    on_nodes,
    ranks,
    sequence_words,
    tokens_per_step,
)
from tprimat.core import units
from tprimat.core.published import SPELLING
from tprimat.records.schema import RunRecord
from tprimat.report.catalogue import MFU, TOKENS, per_rank
from tprimat.report.tables import is_vague, plural
from tprimat.report.winner import gain

MOST_LISTED = 3
"""Values of a trait that a subtitle lists, more are counted; and switches that a label names."""
MOST_HEADLINES = 3
"""Workloads that a headline speaks of."""
MECHANICAL = re.compile(r"(tp|pp|dp|vpp|cp|ep|mbs|gbs|s|gpus?)\d*|bf16|fp8|fp16|fp32|one|two|four|eight")
"""A part of a strategy's name that only repeats layout, batch, dtype or GPUs."""

Words = Callable[[RunRecord], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One group of runs under the name that pictures give it."""

    group: Group
    name: str
    """What differs from the other configurations of its workload. Equal names of several workloads share a colour."""
    label: str
    """The name, with the layout behind a strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Configurations whose speeds belong into one panel: those that the comparison ranks together."""

    title: str
    """What differs from the other workloads; empty where there is one."""
    configurations: tuple[Configuration, ...]
    """Fastest first, those without a throughput last."""
    ranking: Ranking

    @property
    def run(self) -> RunRecord:
        """Return the record of the fastest configuration's first run."""
        return self.configurations[0].group.run


def _tokens(run: RunRecord) -> str:
    tokens = tokens_per_step(run)
    return "tokens a step not recorded" if tokens is None else f"{units.count(tokens)} tokens a step"


def _sequence(run: RunRecord) -> str:
    return "sequence not recorded" if run.ran.sequence_tokens is None else f"sequence {sequence_words(run)}"


def _model(run: RunRecord) -> str:
    """Return the model's name, or the shape's where that is not the usual one."""
    name = model_name(run)
    return name if run.ran.shape is None or model_and_shape(run) == name else run.ran.shape.name


CLOCKS = {"framework": "timed by the framework", "step_end": "timed at the end of each step"}
SHORT = ("model", "gpus", "sequence", "dtype", "tokens", "shape")
"""Traits that titles name first, in words of their own."""
WORK: dict[str, Words] = {
    "model": _model,
    "gpus": lambda run: ranks(run) or "GPUs not recorded",
    "sequence": _sequence,
    "dtype": lambda run: dtype_that_ran(run) or "dtype not recorded",
    "tokens": _tokens,
    "shape": lambda run: _shape(run) or "shape not recorded",
    **{key: TRAITS[key].label for key in FORBIDDING if key not in SHORT},
    "clock": lambda run: CLOCKS.get(run.clock, TRAITS["clock"].label(run)),
}
"""What the configurations of one panel share, by the trait whose difference forbids a comparison."""
DETAILS: dict[str, Words] = {"shape": TRAITS["shape"].label}
"""Longer words, for what the short ones leave equal."""
USUAL = (CLOCKS["step_end"], "expert capacity unlimited", "optimizer states in fp32")
"""Left out of titles that say enough without."""


def short_layout(run: RunRecord) -> str:
    """Return the layout without degrees of 1: 'TP2 DP2', 'DP8'; 'one GPU', or 'one process' on a CPU, where all are 1."""
    full = layout(run)
    alone = per_rank("one GPU", {run.machine.platform}) if full else ""
    return " ".join(part for part in full.split() if not re.fullmatch(r"[A-Z]+1", part)) or alone


def _micro_batch(run: RunRecord) -> str:
    return "" if run.ran.micro_batch_sequences is None else f"micro-batch {run.ran.micro_batch_sequences}"


def engine_name(run: RunRecord) -> str:
    """Return the engine as its makers spell it, and Transformer Engine where its layers were seen in the running model."""
    return engine_words(run).replace(run.engine, SPELLING.get(run.engine, run.engine), 1)


def _strategy(run: RunRecord) -> str:
    return run.strategy or ""


def _recompute(run: RunRecord) -> str:
    return "" if run.ran.recompute is None else f"{'no' if run.ran.recompute == 'none' else run.ran.recompute_words} recompute"


def _shape(run: RunRecord) -> str:
    return "" if run.ran.shape is None else f"{run.ran.shape.layers} layers of {run.ran.shape.hidden}"


def workloads(groups: Sequence[Group], question: Question = QUESTION) -> list[Workload]:
    """Sort groups into workloads, those with the most configurations first, and name each group by what differs.

    The traits that the question is about do not part workloads.
    """
    ordered = sorted(rankings(groups, question), key=lambda ranking: -len(ranking.groups))
    titles = _titles(ordered, question)
    named = [group for ranking in ordered for group in ranking.groups]
    names = _names(named, [len(ranking.groups) for ranking in ordered], [WORK[key] for key in question.varying if key in WORK])
    return [
        Workload(
            title=title,
            configurations=tuple(
                Configuration(group=group, name=names[id(group)][0], label=names[id(group)][1]) for group in ranking.groups
            ),
            ranking=ranking,
        )
        for title, ranking in zip(titles, ordered, strict=True)
    ]


def _titles(found: Sequence[Ranking], question: Question) -> list[str]:
    """Return for each ranking what tells its work from that of the others; the first trait wherever it differs.

    Rankings that this leaves equal also say what they do not record, which is why they do not compare.
    """
    words = [(key, one) for key, one in (*WORK.items(), *DETAILS.items()) if key not in question.varying]
    leaders = [ranking.best for ranking in found]
    rows = [tuple(one(group.run) for _, one in words) for group in leaders]
    shown = _columns_that_distinguish(rows, range(len(words)))
    alike = [tuple(row[index] for index in shown) for row in rows]
    titles = []
    for group, row, key in zip(leaders, rows, alike, strict=True):
        unknown = [index for index, (trait, _) in enumerate(words) if _forbids_unknown(trait, group.run)]
        places = sorted({*shown, *(unknown if alike.count(key) > 1 else [])})
        titles.append([row[index] for index in places if row[index]])
    brief = [[part for part in title if part not in USUAL] for title in titles]
    if all(brief) and len(set(map(tuple, brief))) == len(set(map(tuple, titles))):
        titles = brief
    details = _details(leaders, [tuple(title) for title in titles])
    return [", ".join([*title, *detail]) for title, detail in zip(titles, details, strict=True)]


def _forbids_unknown(key: str, run: RunRecord) -> bool:
    trait = TRAITS[key]
    return trait.value(run) is None and trait.unknown in {None, "refuse"}


def _columns_that_distinguish(rows: Sequence[tuple[object, ...]], order: Iterable[int], fixed: int = 0) -> list[int]:
    """Return the columns, in order, each of which splits rows that the columns before it leave equal.

    The first `fixed` columns are there already, and are not returned.
    """
    shown = list(range(fixed))
    for index in order:
        before = {tuple(row[i] for i in shown) for row in rows}
        after = {tuple(row[i] for i in (*shown, index)) for row in rows}
        if len(after) > len(before):
            shown.append(index)
    return shown[fixed:]


def _names(groups: Sequence[Group], sizes: Sequence[int], more: Sequence[Words] = ()) -> dict[int, tuple[str, str]]:
    """Return name and label of each group, by identity. Groups are in order of their workloads, whose `sizes` are known.

    `more` are words of traits that vary within a workload because they are the question.
    """
    work = [place for place, size in enumerate(sizes) for _ in range(size)]
    named = not all(_mechanical(group.run) for group in groups)
    traits: list[Words] = [
        accelerator_name,
        *([_strategy] if named else []),
        short_layout,
        _micro_batch,
        engine_name,
        _recompute,
        _shape,
        *more,
    ]
    rows = [
        (place, str(group.kind[0]).removesuffix(":"), *(words(group.run) for words in traits))
        for place, group in zip(work, groups, strict=True)
    ]
    shown = _columns_that_distinguish(rows, range(1, len(traits) + 2), fixed=1)
    machines = ACCELERATOR not in shown and len({row[ACCELERATOR] for row in rows}) > 1
    alike = [tuple(row[i] for i in (0, *shown)) for row in rows]
    details = _details(groups, alike)
    strategy = 3 if named else -1
    found = {}
    for group, row, detail in zip(groups, rows, details, strict=True):
        run = group.run
        words = [str(row[i]) for i in shown if row[i]]
        if not words and not detail:
            words = [_strategy(run) or short_layout(run) or model_name(run)] if named else [_by_layout(run)]
        behind = named and (strategy in shown or not shown) and short_layout(run) and short_layout(run) not in words
        label = [f"{part} ({short_layout(run)})" if behind and part == _strategy(run) else part for part in words]
        where = [str(row[ACCELERATOR])] if machines else []
        found[id(group)] = (", ".join([*where, *words, *detail]), ", ".join([*where, *label, *detail]))
    return found


ACCELERATOR = 2
"""Place of the accelerator in the rows of `_names`: after workload and origin."""


def _by_layout(run: RunRecord) -> str:
    return ", ".join(filter(None, (short_layout(run), _micro_batch(run)))) or _strategy(run) or model_name(run)


def _mechanical(run: RunRecord) -> bool:
    """Return whether the strategy's name says nothing that layout, micro-batch and model do not say."""
    parts = _strategy(run).split("_")
    return bool(layout(run)) and all(part == run.model or MECHANICAL.fullmatch(part) for part in parts if part)


def _details(groups: Sequence[Group], alike: Sequence[tuple[object, ...]]) -> list[list[str]]:
    """Return what else tells groups of equal words apart: switches, versions, else the folder or a number."""
    found: list[list[str]] = [[] for _ in groups]
    for key, times in Counter(alike).items():
        if times == 1:
            continue
        places = [place for place, one in enumerate(alike) if one == key]
        for extra in (_switches, _versions, _folders):
            if len({tuple(found[place]) for place in places}) < times:
                for place, words in zip(places, extra([groups[place] for place in places]), strict=True):
                    found[place] += words
        for number, place in enumerate(places, 1):
            if [found[other] for other in places].count(found[place]) > 1:
                found[place].append(f"no. {number}")
    return found


def _switches(groups: Sequence[Group]) -> list[list[str]]:
    """Return the switches that all record and that differ, in words: 'without fused adam'; of many only the first."""
    keys = sorted(set.intersection(*(set(group.run.engine_options) for group in groups)))
    differing = [key for key in keys if len({repr(group.run.engine_options.get(key)) for group in groups}) > 1]
    return [[_switch(key, group.run.engine_options.get(key)) for key in differing[:MOST_LISTED]] for group in groups]


def _switch(key: str, value: object) -> str:
    words = key.replace("_", " ")
    if value is None or value is False:
        return f"without {words}"
    return f"with {words}" if value is True else f"{words} {value}"


def _versions(groups: Sequence[Group]) -> list[list[str]]:
    """Return the versions that differ, without the hash of sources that no reader chose."""
    versions = [{key: value.split("+")[0] for key, value in group.run.software.items()} for group in groups]
    keys = sorted({key for one in versions for key in one})
    differing = [key for key in keys if len({one.get(key) for one in versions}) > 1]
    return [[f"{key} {one[key]}" for key in differing if key in one][:2] for one in versions]


def _folders(groups: Sequence[Group]) -> list[list[str]]:
    """Return the first folder in which the paths of the groups differ."""
    paths = [group.runs[0].result.path.parts for group in groups]
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            return [[part] for part in parts]
    return [[] for _ in groups]


# The headline: the finding, one sentence a workload.


def headline(works: Sequence[Workload]) -> list[str]:
    """Return the finding, in one line for each workload, at most MOST_HEADLINES."""
    if not works:
        return ["No run counts"]
    if on_cpu([one.group for work in works for one in work.configurations]):
        return [_on_a_cpu(works)]
    if all(len(work.configurations) == 1 for work in works):
        machines = {machine_name(work.run) for work in works}
        where = f" on {machines.pop()}" if len(machines) == 1 else ""
        subjects = _subjects(works[:MOST_HEADLINES])
        told = [_single(work, subject, where="" if where else None) for work, subject in subjects]
        return [", ".join(told) + where + _rest(works)]
    lines = [_prefixed(work, _finding(work)) for work in works[:MOST_HEADLINES]]
    lines[-1] += _rest(works)
    return lines


def _on_a_cpu(works: Sequence[Workload]) -> str:
    """Say what trained under what; no speed, which a CPU does not show."""
    models = list(dict.fromkeys(model_name(work.run) for work in works))
    names = list(dict.fromkeys(one.name for work in works for one in work.configurations if one.group.run.strategy))
    machines = list(dict.fromkeys(machine_name(work.run) for work in works))
    what, how, where = (few(words, MOST_LISTED + (len(words) == MOST_LISTED + 1)) for words in (models, names, machines))
    under = f" under {how}" if how else ""
    one = len(models) == 1
    return f"{what} train{'s' * one}{under} on {where}; a CPU does not show how fast {'it trains' if one else 'they train'}"


def _rest(works: Sequence[Workload]) -> str:
    more = len(works) - MOST_HEADLINES
    return f"; {plural(more, 'more workload')}" if more > 0 else ""


def _prefixed(work: Workload, text: str) -> str:
    return f"{work.title}: {text}" if work.title else text


def _subjects(works: Sequence[Workload]) -> list[tuple[Workload, str]]:
    """Name each workload by its model, and by its title as well where another one has that model and machine."""
    models = [(_model(work.run), machine_name(work.run)) for work in works]
    subjects = []
    for work, (model, machine) in zip(works, models, strict=True):
        title = "" if models.count((model, machine)) == 1 else work.title.removeprefix(model).removeprefix(", ")
        subjects.append((work, f"{model} ({title})" if title else model))
    return subjects


def _single(work: Workload, subject: str, where: str | None = None) -> str:
    """Return the speed of the only configuration; with its machine unless `where` says another word."""
    rate, run = throughput(work.configurations[0].group), work.run
    if rate is None or run.machine.gpus is None:
        return f"{subject}: throughput not known"
    share = MFU.value(work.configurations[0].group)
    part = f" ({units.percent(share)} of the dense peak)" if share is not None else ""
    place = f" on {machine_name(run)}" if where is None else where
    return f"{subject} trains at {units.count(rate.value * run.machine.gpus)} tokens/s{place}{part}"


def _finding(work: Workload) -> str:
    best = work.configurations[0]
    names = {id(configuration.group): configuration.name for configuration in work.configurations}
    ranking = work.ranking
    if throughput(best.group) is None:
        return "throughput not known"
    lead = ranking.lead
    if lead is None or lead.ratio is None:
        only = len(work.configurations) == 1
        return _single(work, "it").removeprefix("it trains at ") if only else f"{best.name} has the highest throughput"
    second = names[id(ranking.groups[1])]
    rival = _without(second, best.name)
    faster = f"{_ahead(ranking, 'faster than')} {rival}"
    if lead.outcome == "faster":
        held = ", although its clocks were held back" if lead.handicapped else ""
        return f"{best.name} is fastest, {_ahead(ranking, 'ahead of')} {rival}{held}"
    if lead.outcome == "held back":
        return f"{best.name} ran {faster}, whose clocks were held back"
    if lead.outcome == "other loss":
        return f"{best.name} ran {faster}, to another loss"
    if lead.outcome == "these runs differ":
        return f"{best.name} ran {faster}, in too few runs to rank them"
    if lead.ratio.low is None:
        return f"{best.name} leads {rival} by {gain(lead.ratio)}; single steps have no interval"
    tied = [_without(names[id(group)], best.name) for group in ranking.tied]
    rest = f" and {len(tied) - 2} more" if len(tied) > 2 else ""
    return f"{best.name} leads within the noise of {', '.join(tied[:2])}{rest}"


def _without(name: str, other: str) -> str:
    """Leave out of a name what another one has in common with it."""
    return ", ".join(part for part in name.split(", ") if part not in other.split(", ")) or name


def _ahead(ranking: Ranking, words: str) -> str:
    """Return '8.4 % [8.1, 8.7] faster than', or '4.48 times [3.68, 5.47] as fast as' from 2 on."""
    ratio = ranking.lead.ratio if ranking.lead else None
    return f"{gain(ratio)} {'as fast as' if ratio and ratio.value >= 2 else words}"


# The subtitle: what the runs were.


def subtitle(works: Sequence[Workload]) -> list[str]:
    """Return what ran, and how often: model, machine, strategy, batch, sequence, dtype, engine; then date, runs and n."""
    groups = [one.group for work in works for one in work.configurations]
    runs = [group.run for group in groups]
    if not runs:
        return []
    what = [
        _values(runs, _full_model, "models"),
        _values(runs, lambda run: machine_name(run) + on_nodes(run), "machines"),
        _values(runs, _strategy_and_layout, "strategies"),
        _values(runs, _batch, "batches", "batch "),
        _values(
            runs,
            lambda run: "" if run.ran.sequence_tokens is None else units.count(run.ran.sequence_tokens),
            "sequences",
            "sequence ",
        ),
        _values(runs, lambda run: dtype_that_ran(run) or "dtype not recorded", "dtypes"),
        _values(runs, engine_name, "engines"),
    ]
    return [" · ".join(filter(None, what)), " · ".join(filter(None, _amount(groups))), *_differing(works)]


def _differing(works: Sequence[Workload]) -> list[str]:
    """Name the traits in which configurations of one workload differ; those with values that a reader may not expect."""
    judged = [found for work in works for found in work.ranking.against_best if found is not None]
    traits = {one.key: one for found in judged for one in found.traits}
    warned = {one.key for found in judged for one in found.traits if one.effect == "warn"}
    listed = [one.name for key, one in traits.items() if key not in warned]
    cautions = [f"{one.name} ({' against '.join(one.words)})" for key, one in traits.items() if key in warned]
    lines = [f"Configurations differ in {', '.join(listed)}"] if listed else []
    return lines + ([f"Caution, they also differ in {', '.join(cautions)}"] if cautions else [])


def _full_model(run: RunRecord) -> str:
    if run.ran.shape is None or run.ran.shape.name is None:
        return model_name(run)
    return run.ran.shape.name if run.size == "full" or run.size in run.ran.shape.name else f"{run.ran.shape.name} {run.size}"


def _strategy_and_layout(run: RunRecord) -> str:
    return " ".join(filter(None, ("" if _mechanical(run) else _strategy(run), layout(run))))


def _batch(run: RunRecord) -> str:
    if run.ran.global_batch_sequences is None:
        return ""
    micro = "" if run.ran.micro_batch_sequences is None else f" (micro {run.ran.micro_batch_sequences})"
    return f"{run.ran.global_batch_sequences}{micro}"


def _values(runs: Sequence[RunRecord], words: Words, several: str, before: str = "") -> str:
    values = list(dict.fromkeys(filter(None, map(words, runs))))
    if len(values) > MOST_LISTED:
        return f"{len(values)} {several}"
    return before + ", ".join(values) if values else ""


def _amount(groups: Sequence[Group]) -> list[str]:
    measured: list[Measured] = [item for group in groups for item in group.runs]
    days = sorted({item.result.run.started_at[:10] for item in measured if item.result.run.started_at})
    per_group = sorted({len(group.runs) for group in groups})
    runs = plural(len(measured), "run")
    if len(groups) > 1:
        each = (
            "one each"
            if per_group == [1]
            else f"{per_group[0]} each"
            if len(per_group) == 1
            else f"{per_group[0]} to {per_group[-1]} each"
        )
        runs = f"{plural(len(groups), 'configuration')}, {runs}, {each}"
    steps = sum(item.metrics.window.steps for item in measured if item.metrics)
    spread = "95 % intervals over steps" if per_group[-1] == 1 else "95 % intervals over runs where there are several"
    if any(is_vague(found) for group in groups if (found := TOKENS.of_group(group)) is not None):
        spread += "; a bar without a line has too few steps or runs for one"
    return [" to ".join(dict.fromkeys((days[0], days[-1]))) if days else "", runs, f"n = {plural(steps, 'steady step')}", spread]
