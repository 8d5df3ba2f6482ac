"""Who wins: configurations that may be compared with one another, the fastest first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tprimat.analyze.compare import Verdict, comparable, verdict
from tprimat.analyze.groups import Group, group_estimate
from tprimat.errors import ConfigError
from tprimat.records.metrics import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Configurations of one workload. Speeds of different races are never held against each other."""

    groups: tuple[Group, ...]
    """Fastest first; those without a throughput come last."""
    against_best: tuple[Verdict | None, ...]
    """For each group what its measurements say of it against the first; None for the first itself."""
    lead: Verdict | None
    """The first against the second: what the win is worth. None without a second that has a throughput."""

    @property
    def best(self) -> Group:
        """The group with the highest throughput of one GPU."""
        return self.groups[0]

    @property
    def level(self) -> tuple[Group, ...]:
        """Groups that are not shown to be slower than the best, which is not among them."""
        paired = zip(self.groups, self.against_best, strict=True)
        return tuple(group for group, found in paired if found is not None and found.outcome == "no difference shown")


def throughput(group: Group) -> Estimate | None:
    """Tokens a second of one GPU."""
    return group_estimate(group, lambda metrics: metrics.tokens_per_second_per_gpu)


def rankings(groups: Sequence[Group]) -> list[Ranking]:
    """All groups, each in one race; races in order of first appearance."""
    fields: list[list[Group]] = []
    for group in groups:
        known = next((field for field in fields if not comparable(field[0].run, group.run)), None)
        if known is None:
            fields.append([group])
        else:
            known.append(group)
    return [_ranking(field) for field in fields]


def _ranking(field: Sequence[Group]) -> Ranking:
    ranked = sorted(field, key=_slowness)
    best = ranked[0]
    judged = tuple(None if group is best or throughput(best) is None else verdict(best, group) for group in ranked)
    second = ranked[1] if len(ranked) > 1 and throughput(ranked[1]) is not None else None
    return Ranking(groups=tuple(ranked), against_best=judged, lead=None if second is None else verdict(second, best))


def _slowness(group: Group) -> float:
    rate = throughput(group)
    return float("inf") if rate is None else -rate.value


# Which configuration is compared with which.

Pair = tuple[Group, Group]
"""Baseline and candidate."""


def most_alike(leaders: Sequence[Group], group: Group) -> Group:
    """The leader most like a group: first in workload, then in configuration; of equals the first. At least one leader."""

    def distance(leader: Group) -> tuple[int, int]:
        unlike = sum(one != other for one, other in zip(leader.kind[1:], group.kind[1:], strict=True))
        return len(comparable(leader.run, group.run)), unlike

    return min(leaders, key=distance)


def default_pairs(groups: Sequence[Group]) -> list[Pair]:
    """Each configuration with the first one of its model that it may be compared with, or, to be refused, the most alike."""
    leaders: dict[tuple[str, str], list[Group]] = {}
    pairs = []
    for group in groups:
        known = leaders.setdefault((group.run.model, group.run.size), [])
        if known:
            leader = min(known, key=lambda leader: len(comparable(leader.run, group.run)))
            pairs.append((leader, group))
        if not known or comparable(leader.run, group.run):
            known.append(group)
    return pairs


def pairs_with(baselines: Sequence[Group], groups: Sequence[Group]) -> list[Pair]:
    """Every other configuration with the baseline most like it."""
    chosen = {id(group) for group in baselines}
    return [(most_alike(baselines, group), group) for group in groups if id(group) not in chosen]


def groups_in(folder: Path, groups: Sequence[Group]) -> list[Group]:
    """The groups all of whose runs lie in a folder, or are that file."""
    return [group for group in groups if all(folder in (item.result.path, *item.result.path.parents) for item in group.runs)]


def groups_named(words: str, groups: Sequence[Group]) -> list[Group]:
    """The group that words of its label mean; one a model, so that a word may name a machine or a strategy for all models.

    Raises:
        ConfigError: none matches, or several of one model.
    """
    matches = [group for group in groups if group.label == words]
    matches = matches or [group for group in groups if set(words.split()) <= set(group.label.split())]
    models = {(group.run.model, group.run.size) for group in matches}
    if not matches or len(models) < len(matches):
        raise ConfigError(
            f"--baseline {words!r} fits {len(matches)} configurations.",
            where="--baseline",
            why="One for each model is needed.",
            fix="a folder, or words of one of:\n" + "\n".join(group.label for group in matches or groups),
        )
    return matches
