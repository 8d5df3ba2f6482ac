"""Which configuration is compared with which."""

from collections.abc import Sequence
from pathlib import Path

from tprimat.analyze.compare import comparable
from tprimat.analyze.groups import Group
from tprimat.errors import ConfigError

Pair = tuple[Group, Group]
"""Baseline and candidate."""


def nearest(leaders: Sequence[Group], group: Group) -> Group:
    """The leader most like a group: first in workload, then in configuration; of equals the first. At least one leader."""

    def distance(leader: Group) -> tuple[int, int]:
        unlike = sum(one != other for one, other in zip(leader.kind[1:], group.kind[1:], strict=True))
        return len(comparable(leader.run, group.run)), unlike

    return min(leaders, key=distance)


def pair_off(groups: Sequence[Group]) -> list[Pair]:
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


def against(baselines: Sequence[Group], groups: Sequence[Group]) -> list[Pair]:
    """Every other configuration with the baseline most like it."""
    chosen = {id(group) for group in baselines}
    return [(nearest(baselines, group), group) for group in groups if id(group) not in chosen]


def of_folder(folder: Path, groups: Sequence[Group]) -> list[Group]:
    """The groups all of whose runs lie in a folder, or are that file."""
    return [group for group in groups if all(folder in (item.result.path, *item.result.path.parents) for item in group.runs)]


def of_words(words: str, groups: Sequence[Group]) -> list[Group]:
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
