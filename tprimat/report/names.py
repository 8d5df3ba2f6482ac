"""Names of configurations and of the work that they share: one name each, in tables, sentences, pictures and pages."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tprimat.analyze import traits
from tprimat.analyze.compare import Ranking
from tprimat.analyze.groups import Group, label_of, labels_among
from tprimat.core import units
from tprimat.records.schema import RunRecord
from tprimat.report.catalogue import per_rank
from tprimat.report.plan import NAMES

OF_THE_WORK = {"model", "accelerator", *traits.FORBIDDING}
"""Traits that belong to a heading where there is a single configuration."""
IN_HEADINGS = ("gpus", "tokens", "sequence", "dtype", "routing")
"""Traits that a heading names apart from the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One group of runs under its name."""

    group: Group
    name: str
    """What differs from the other configurations of its workload. Equal names of several workloads share a color."""
    label: str
    """The name, with the layout behind a strategy."""

    def label_among(self, work: "RankedWorkload") -> str:
        """Return the label with its workload in front where there are several."""
        return f"{work.title}: {self.label}" if work.title else self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedWorkload:
    """Configurations whose speeds belong into one panel: those that the comparison ranks together."""

    title: str
    """What differs from the other workloads; empty where there is one."""
    configurations: tuple[Configuration, ...]
    """Fastest first, those without a throughput last."""
    ranking: Ranking


def ranked_workloads(rankings: Sequence[Ranking]) -> list[RankedWorkload]:
    """Name each workload and configuration, workloads with the most configurations first."""
    ordered = sorted(rankings, key=lambda ranking: -len(ranking.groups))
    return [
        RankedWorkload(title=title, configurations=tuple(configurations(ranking.groups)), ranking=ranking)
        for title, ranking in zip(_titles(ordered), ordered, strict=True)
    ]


def configurations(groups: Sequence[Group]) -> list[Configuration]:
    """Name configurations by what tells them apart."""
    names = short_names(groups)
    named = []
    for group in groups:
        name, strategy, split = names[id(group)], group.run.strategy, short_layout(group.run)
        behind = strategy and split and strategy in name.split() and split not in name
        label = name.replace(strategy, f"{strategy} ({split})", 1) if strategy and behind else name
        imported = group.run.source is not None and traits.engine_words(group.run) not in label
        label += f", {traits.engine_words(group.run)}" if imported else ""
        named.append(Configuration(group=group, name=name, label=label))
    return named


def _titles(rankings: Sequence[Ranking]) -> list[str]:
    """Return what tells the work of each ranking from that of the others; a number where nothing that is recorded does."""
    facts = [_facts(ranking, traits.FORBIDDING) for ranking in rankings]
    titles: list[tuple[str, ...]] = [()] * len(rankings)
    for key in dict.fromkeys(key for several in facts for key in several):
        words = [several.get(key, "") for several in facts]
        longer = [(*title, *filter(None, [word])) for title, word in zip(titles, words, strict=True)]
        if len({*longer}) > len({*titles}) or (key == "accelerator" and len({*words}) > 1):
            titles = longer
    named = [", ".join(title) for title in titles]
    return [
        title if named.count(title) == 1 else f"{title or 'too little recorded'}, no. {1 + named[:place].count(title)}"
        for place, title in enumerate(named)
    ]


def short_layout(run: RunRecord) -> str:
    """Return the layout without degrees of 1: 'TP2 DP2', 'DP8'; 'one GPU', or 'one process' on a CPU, where all are 1."""
    alone = per_rank("one GPU", {run.machine.platform}) if traits.layout(run) else ""
    return run.ran.layout_words(ones=()) or alone


def shared_parts(groups: Sequence[Group]) -> dict[str, str]:
    """Return the parts that the labels of all groups have, by trait; of a single group those of its work and accelerator."""
    first = dict(groups[0].parts)
    if len(groups) == 1:
        return {key: words for key, words in first.items() if key in OF_THE_WORK}
    return {key: words for key, words in first.items() if all((key, words) in group.parts for group in groups)}


def short_names(groups: Sequence[Group]) -> dict[int, str]:
    """Return labels that tell these groups from each other, by identity, without the parts that they share."""
    if len(groups) == 1:
        labels, shared = [groups[0].parts], set(shared_parts(groups).items())
    else:
        labels = labels_among(groups)
        shared = set(labels[0]).intersection(*labels[1:])
    names = [label_of(part for part in label if part not in shared).removesuffix(":") for label in labels]
    return {id(group): name or group.run.strategy or group.label for group, name in zip(groups, names, strict=True)}


def shortest_ends(paths: Iterable[str]) -> dict[str, str]:
    """Return the shortest end of each path that no other one has: of x/new/dp, x/old/dp and x/old/tp new/dp, old/dp and tp."""
    ends = {path: list(accumulate(reversed(path.split("/")), lambda end, part: f"{part}/{end}")) for path in paths}
    times = Counter(end for several in ends.values() for end in several)
    return {path: next((end for end in several if times[end] == 1), path) for path, several in ends.items()}


def heading(ranking: Ranking) -> str:
    """Name what the configurations of a ranking share: model, accelerator, GPUs, tokens, sequence length, dtype."""
    return ", ".join(_facts(ranking).values())


def _facts(ranking: Ranking, more: Sequence[str] = ()) -> dict[str, str]:
    """Return what a heading says, and `more` traits by their keys; not what is the question."""
    run, tokens = ranking.best.run, traits.tokens_per_step(ranking.best.run)
    shapes = {group.run.ran.shape.name for group in ranking.groups if group.run.ran.shape is not None}
    nodes = {group.run.machine.nodes for group in ranking.groups}
    shared = {key: words for key, words in shared_parts(ranking.groups).items() if key not in IN_HEADINGS}
    facts = {
        "": " ".join(shared.values()) or run.model,
        "shape": shapes.pop() if len(shapes) == 1 else None,
        "gpus": (traits.ranks(run) or "") + (traits.on_nodes(run) if len(nodes) == 1 else ""),
        "tokens": f"{units.count(tokens)} tokens a step" if tokens else None,
        "sequence": f"sequence {traits.sequence_words(run)}" if run.ran.sequence_tokens else None,
        "dtype": traits.dtype_that_ran(run),
        "routing": traits.TRAITS["routing"].label(run),
    }
    if more:  # of a title, where each fact stands for itself
        several = len({traits.accelerator_name(group.run) for group in ranking.groups}) > 1
        facts |= {
            "": traits.model_and_shape(run),
            "accelerator": None if several else traits.accelerator_name(run),
            "shape": None,
        }
        facts |= {key: traits.TRAITS[key].label(run) for key in more if key not in {*facts, "model"}}
    return {key: fact for key, fact in facts.items() if fact and key not in ranking.question.varying}


LOSS_NAMES: Mapping[str, str] = {**NAMES["time"], **NAMES["losses"]}
"""Part of a step -> its name in a waterfall. Communication counts as far as it is exposed."""
KNOWN_BY: Mapping[str, str] = NAMES["known_by"]
"""How a part is known -> the same in words."""
