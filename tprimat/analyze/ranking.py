"""Rank configurations that may be compared with each other, and choose which pairs a comparison judges."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tprimat.analyze.compare import Verdict, comparable, verdict
from tprimat.analyze.groups import Group, group_estimate
from tprimat.errors import ConfigError
from tprimat.records.metrics import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The configurations of one workload. Speeds of different rankings are never compared."""

    groups: tuple[Group, ...]
    """Fastest first, those without a throughput last."""
    against_best: tuple[Verdict | None, ...]
    """For each group the verdict on it against the first; None for the first itself."""
    lead: Verdict | None
    """The verdict on the first against the second; None without a second that has a throughput."""

    @property
    def best(self) -> Group:
        """Return the group with the highest throughput of one GPU."""
        return self.groups[0]

    @property
    def tied(self) -> tuple[Group, ...]:
        """Return the other groups that are not shown to be slower than the best."""
        paired = zip(self.groups, self.against_best, strict=True)
        return tuple(group for group, found in paired if found is not None and found.outcome == "no difference shown")


def throughput(group: Group) -> Estimate | None:
    """Return the tokens/s of one GPU."""
    return group_estimate(group, lambda metrics: metrics.tokens_per_second_per_gpu)


def rankings(groups: Sequence[Group]) -> list[Ranking]:
    """Return every group in one ranking, rankings in order of first appearance."""
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


Pair = tuple[Group, Group]
"""Baseline and candidate."""


def most_alike(leaders: Sequence[Group], group: Group) -> Group:
    """Return the leader most like a group: by workload, then by configuration; the first of equals. Needs one leader at least."""

    def distance(leader: Group) -> tuple[int, int]:
        unlike = sum(one != other for one, other in zip(leader.kind[1:], group.kind[1:], strict=True))
        return len(comparable(leader.run, group.run)), unlike

    return min(leaders, key=distance)


def default_pairs(groups: Sequence[Group]) -> list[Pair]:
    """Pair each configuration with the first of its model that it may be compared with, or with the most alike, to be refused."""
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
    """Pair every other configuration with the baseline most like it."""
    chosen = {id(group) for group in baselines}
    return [(most_alike(baselines, group), group) for group in groups if id(group) not in chosen]


def groups_in(folder: Path, groups: Sequence[Group]) -> list[Group]:
    """Return the groups whose runs all lie in a folder, or are that file."""
    return [group for group in groups if all(folder in (item.result.path, *item.result.path.parents) for item in group.runs)]


def groups_named(words: str, groups: Sequence[Group]) -> list[Group]:
    """Return the groups that words of a label name: one per model, so that a word may name a machine for all models.

    Raises:
        ConfigError: none matches, or several of one model.
    """
    matches = [group for group in groups if group.label == words]
    matches = matches or [group for group in groups if set(words.split()) <= set(group.label.split())]
    models = {(group.run.model, group.run.size) for group in matches}
    if not matches or len(models) < len(matches):
        raise ConfigError(
            f"--baseline {words!r} matches {len(matches)} configurations.",
            where="--baseline",
            why="One for each model is needed.",
            fix="a folder, or words of one of:\n" + "\n".join(group.label for group in matches or groups),
        )
    return matches
