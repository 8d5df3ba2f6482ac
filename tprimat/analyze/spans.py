"""Trace events as spans of time: what ran, when, as which class of work, and where the steps begin and end.

Times of events are microseconds (the Trace Event Format of Chrome); here they are seconds from the trace's first event.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tprimat.analyze.kernels import WorkClass, kernel_class, operator_class
from tprimat.errors import MetricError

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

CLASSES: tuple[WorkClass, ...] = get_args(WorkClass)
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of what runs on an accelerator, CUPTI's and ROCm's alike."""
SUMMARISED = (*DEVICE_WORK, "gpu_user_annotation", "user_annotation", "cpu_op")
OPTIMIZER_RANGE = re.compile(r"optimizer_step$|Optimizer\.step#")
"""What Megatron's step and torch's optimizers are marked with."""
STEP_RANGE = re.compile(r"ProfilerStep#(\d+)$")
INHERITED: tuple[WorkClass, ...] = ("attention", "optimizer", "communication")
"""An operator inside one of these belongs to it, unless it communicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Columns of equal length, one entry a span."""

    starts: Floats
    ends: Floats
    kinds: Indices
    """Into CLASSES."""
    names: Indices
    """Into `texts`."""
    calls: Floats
    """1 where an event begins, 0 for its later parts."""
    texts: tuple[str, ...]

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Spans":
        """The chosen ones."""
        return Spans(
            starts=self.starts[chosen],
            ends=self.ends[chosen],
            kinds=self.kinds[chosen],
            names=self.names[chosen],
            calls=self.calls[chosen],
            texts=self.texts,
        )

    def inside(self, start: float, end: float) -> "Spans":
        """Those that reach into a window, cut at its ends."""
        part = self.where((self.ends > start) & (self.starts < end))
        return replace(part, starts=np.clip(part.starts, start, end), ends=np.clip(part.ends, start, end))


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One step of training in a trace."""

    number: int
    """Of ProfilerStep#."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Row:
    """One complete event, or a part of one."""

    start: float
    end: float
    name: str
    kind: WorkClass
    begins: bool = True


class TraceEvent(NamedTuple):
    """What a summary needs of an event with a duration."""

    category: str
    name: str
    start: float
    end: float
    thread: tuple[Any, Any]
    """Process and thread, or device and stream."""


def complete_events(events: Iterable[Any]) -> list[TraceEvent]:
    """The events with a duration of the categories that summaries are made of.

    Raises:
        MetricError: there is none, or one without the numbers that the format asks for.
    """
    whole = [
        event
        for event in events
        if isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") in SUMMARISED and "name" in event
    ]
    if not whole:
        raise MetricError(
            "The trace holds no kernel and no operator.", fix="profile at least one whole step with torch's profiler"
        )
    try:
        first = min(float(event["ts"]) for event in whole)
        return [_read(event, first) for event in whole]
    except (KeyError, TypeError, ValueError) as error:
        raise MetricError("An event of the trace has no start or duration in microseconds.", why=repr(error)) from error


def _read(event: Mapping[str, Any], first: float) -> TraceEvent:
    start = float(event["ts"]) - first
    end = start + float(event["dur"])
    return TraceEvent(event["cat"], str(event["name"]), start / 1e6, end / 1e6, (event.get("pid"), event.get("tid")))


def device_spans(events: Sequence[TraceEvent]) -> Spans:
    """Kernels and copies of the accelerator. Small kernels inside the optimizer's range of their stream are the optimizer's."""
    work = [event for event in events if event.category in DEVICE_WORK]
    ranges: dict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.category == "gpu_user_annotation" and OPTIMIZER_RANGE.match(event.name):
            ranges[event.thread].append((event.start, event.end))
    return _columns([_Row(event.start, event.end, event.name, _kind(event, ranges)) for event in work])


def _kind(event: TraceEvent, ranges: Mapping[tuple[Any, Any], Sequence[tuple[float, float]]]) -> WorkClass:
    kind = kernel_class(event.name)
    if event.category != "kernel":
        return kind if kind == "communication" else "memory_copy"
    if kind not in {"norm_elementwise", "other"}:
        return kind
    around = ranges.get(event.thread, ())
    inside = any(start <= event.start and event.end <= end for start, end in around)
    return "optimizer" if inside else kind


def host_spans(events: Sequence[TraceEvent]) -> Spans:
    """Operators of the host without the operators inside them: each moment of a thread counts once."""
    threads: dict[tuple[Any, Any], list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.category == "cpu_op" or _marks(event):
            threads[event.thread].append(event)
    return _columns([row for thread in threads.values() for row in _innermost(thread)])


def _marks(event: TraceEvent) -> bool:
    """The optimizer's range, and the collectives of Gloo, which are no cpu_op."""
    return event.category == "user_annotation" and operator_class(event.name) in {"optimizer", "communication"}


@dataclass(slots=True)
class _Open:
    """An event that later ones may be nested in."""

    event: TraceEvent
    kind: WorkClass
    counted: bool = False


def _innermost(thread: list[TraceEvent]) -> list[_Row]:
    """Cut nested events of one thread into the stretches in which each of them was the innermost."""
    rows: list[_Row] = []
    stack: list[_Open] = []
    at = 0.0

    def advance(to: float) -> None:
        nonlocal at
        if stack and to > at:
            inner = stack[-1]
            if inner.event.category == "cpu_op" or inner.kind == "communication":
                rows.append(_Row(at, to, inner.event.name, inner.kind, not inner.counted))
                inner.counted = True
        at = max(at, to)

    for event in sorted(thread, key=lambda event: (event.start, -event.end)):
        while stack and stack[-1].event.end <= event.start:
            advance(stack[-1].event.end)
            stack.pop()
        advance(event.start)
        stack.append(_Open(event, _nested_kind(event, stack)))
    while stack:
        advance(stack[-1].event.end)
        stack.pop()
    return rows


def _nested_kind(event: TraceEvent, around: Sequence[_Open]) -> WorkClass:
    own = operator_class(event.name)
    outer = around[-1].kind if around else own
    return outer if outer in INHERITED and own != "communication" else own


def _columns(rows: Sequence[_Row]) -> Spans:
    texts = tuple(dict.fromkeys(row.name for row in rows))
    place = {text: i for i, text in enumerate(texts)}
    return Spans(
        starts=np.array([row.start for row in rows], dtype=np.float64),
        ends=np.array([row.end for row in rows], dtype=np.float64),
        kinds=np.array([CLASSES.index(row.kind) for row in rows], dtype=np.int64),
        names=np.array([place[row.name] for row in rows], dtype=np.int64),
        calls=np.array([row.begins for row in rows], dtype=np.float64),
        texts=texts,
    )


def step_windows(events: Sequence[TraceEvent], category: str) -> list[StepWindow]:
    """The ProfilerStep# ranges, each up to the start of the next, so that what lies between two steps belongs to the first.

    Args:
        events: complete ones.
        category: gpu_user_annotation for a device's own ranges (one a stream, which are joined), user_annotation for the host's.
    """
    found: dict[int, tuple[float, float]] = {}
    for event in events:
        match = STEP_RANGE.match(event.name) if event.category == category else None
        if match:
            number = int(match[1])
            start, end = found.get(number, (event.start, event.end))
            found[number] = (min(start, event.start), max(end, event.end))
    numbers = sorted(found)
    following = {number: found[after][0] for number, after in pairwise(numbers)}
    return [StepWindow(number, found[number][0], following.get(number, found[number][1])) for number in numbers]
