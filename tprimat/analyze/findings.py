"""What there is to say about runs, as data; report/words.py puts it into sentences."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tprimat.analyze.groups import Group, Measured

Kind = Literal["no MFU", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that holds for some runs or configurations."""

    kind: Kind
    what: str
    """Why there is no MFU, or what the metrics of a run warn of."""
    subjects: tuple[str, ...]
    """Configurations without an MFU; runs, each as often as it is warned of."""


def findings(
    groups: Iterable[Group], name: Callable[[Measured], str], more: Callable[[Measured], Sequence[str]] = lambda _: ()
) -> list[Finding]:
    """Return why configurations have no MFU, then what runs warn of, each once; `more` are further warnings of a run."""
    subjects: dict[tuple[Kind, str], list[str]] = {}
    groups = list(groups)
    for group in groups:
        metrics = group.runs[0].metrics
        if metrics is not None and metrics.mfu_absent_because is not None:
            subjects.setdefault(("no MFU", metrics.mfu_absent_because), []).append(group.label)
    for item in (item for group in groups for item in group.runs):
        for warning in (*(item.metrics.warnings if item.metrics else ()), *more(item)):
            subjects.setdefault(("warning", warning), []).append(name(item))
    return [Finding(kind=kind, what=what, subjects=tuple(names)) for (kind, what), names in subjects.items()]
