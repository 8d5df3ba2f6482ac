"""Who wins: configurations that may be compared with one another, the fastest first."""

from collections.abc import Sequence
from dataclasses import dataclass

from tprimat.analyze.compare import Verdict, comparable, verdict
from tprimat.analyze.groups import Group, group_estimate
from tprimat.record.derived import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
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


def races(groups: Sequence[Group]) -> list[Race]:
    """All groups, each in one race; races in order of first appearance."""
    fields: list[list[Group]] = []
    for group in groups:
        known = next((field for field in fields if not comparable(field[0].run, group.run)), None)
        if known is None:
            fields.append([group])
        else:
            known.append(group)
    return [_race(field) for field in fields]


def _race(field: Sequence[Group]) -> Race:
    ranked = sorted(field, key=_slowness)
    best = ranked[0]
    judged = tuple(None if group is best or throughput(best) is None else verdict(best, group) for group in ranked)
    second = ranked[1] if len(ranked) > 1 and throughput(ranked[1]) is not None else None
    return Race(groups=tuple(ranked), against_best=judged, lead=None if second is None else verdict(second, best))


def _slowness(group: Group) -> float:
    rate = throughput(group)
    return float("inf") if rate is None else -rate.value
