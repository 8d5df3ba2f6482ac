"""What there is to say about runs, each thing once for all of them, as data; report/words.py puts it into sentences."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tprimat.analyze.groups import Group, Measured
from tprimat.records.schema import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A finding of several runs or configurations."""

    kind: str
    subjects: tuple[str, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]
    """Of each number."""
    places: tuple[str, ...]
    """The runs, each as often as it has the finding; the configurations that have no MFU."""


def findings(
    groups: Iterable[Group], name: Callable[[Measured], str], more: Callable[[Measured], Sequence[Finding]] = lambda _: ()
) -> list[Shared]:
    """Return why configurations have no MFU, then what there is to know of runs; `more` are further findings of a run."""
    groups = list(groups)
    alike: dict[tuple[str, tuple[str, ...]], list[tuple[Finding, str]]] = {}
    for group in groups:
        if (metrics := group.runs[0].metrics) and metrics.mfu_absent_because:
            absent = Finding(kind="no MFU", subjects=(metrics.mfu_absent_because,))
            alike.setdefault((absent.kind, absent.subjects), []).append((absent, group.label))
    for item in (item for group in groups for item in group.runs):
        for one in (*(item.metrics.warnings if item.metrics else ()), *more(item)):
            alike.setdefault((one.kind, one.subjects), []).append((one, name(item)))
    return [
        Shared(
            kind=kind,
            subjects=subjects,
            least=tuple(map(min, zip(*(one.numbers for one, _ in several), strict=True))),
            most=tuple(map(max, zip(*(one.numbers for one, _ in several), strict=True))),
            places=tuple(place for _, place in several),
        )
        for (kind, subjects), several in alike.items()
    ]
