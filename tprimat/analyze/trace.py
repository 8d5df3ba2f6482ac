"""Time of each class of work in a training step, from a trace of torch's profiler.

The name of a kernel, or of an operator on a CPU, decides its class (work_classes.py).

Events have times in microseconds (Chrome's Trace Event Format); here they are seconds from the first event of the trace.
"""

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tprimat.analyze.work_classes import CLASSES, COMPUTE, WorkClass, kernel_class, operator_class
from tprimat.core.errors import MetricError

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of work on an accelerator, for CUPTI and ROCm."""
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver")
"""Calls on the host, HIP's under the names of CUDA's; a kernel has the correlation of the call that launched it."""
SUMMARISED = (*DEVICE_WORK, *LAUNCHES, "gpu_user_annotation", "user_annotation", "cpu_op")
FORMER = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
"""Kineto's categories in torch 1.8 to 1.11, which begin with a capital, and their names since."""
OPTIMIZER_RANGE = re.compile(r"optimizer_step$|Optimizer\.step#")
"""Marks of Megatron's step and of torch's optimizers."""
ROUTER_RANGE = re.compile(r"moe_router$")
"""Mark of our layers with experts."""
RANGES: tuple[tuple[WorkClass, re.Pattern[str]], ...] = (("optimizer", OPTIMIZER_RANGE), ("router", ROUTER_RANGE))
STEP_RANGE = re.compile(r"ProfilerStep#(\d+)$")
INHERITED: tuple[WorkClass, ...] = ("attention", "optimizer", "communication")
"""Operators inside one of these classes belong to it, unless they communicate."""


SPAN = np.dtype([("start", "f8"), ("end", "f8"), ("kind", "i8"), ("name", "i8"), ("begins", "f8")])
"""One span: its kind counts in CLASSES, its name in the names of all spans; `begins` is 0 for the later parts of an event."""
Spans = npt.NDArray[np.void]
"""Of dtype SPAN, shape (n,)."""


def inside(spans: Spans, start: float, end: float) -> Spans:
    """Return the spans that reach into a window, cut at its ends."""
    part = spans[(spans["end"] > start) & (spans["start"] < end)]
    part["begins"][part["start"] < start] = 0  # the window before counts the call
    for edge in ("start", "end"):
        part[edge] = np.clip(part[edge], start, end)
    return part


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
    """The part of an event with a duration that a summary needs."""

    category: str
    name: str
    start: float
    end: float
    thread: tuple[Any, Any]
    """Process and thread, or device and stream."""
    correlation: int | None = None
    """Joins a launch on the host and its work on the device."""


def complete_events(events: Iterable[Any]) -> list[TraceEvent]:
    """Return the events with a duration in the categories that a summary uses.

    Raises:
        MetricError: there is none, or one lacks the numbers that the format requires.
    """
    whole = [
        event
        for event in events
        if isinstance(event, dict) and event.get("ph") == "X" and _category(event) in SUMMARISED and "name" in event
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


def _category(event: Mapping[str, Any]) -> str:
    """Return an event's category as Kineto names it today; in torch 1.8 the range of a step is an operator."""
    small = str(event.get("cat", "")).lower()
    category = FORMER.get(small, small)
    is_step = category == "cpu_op" and STEP_RANGE.match(str(event.get("name")))
    return "user_annotation" if is_step else category


def _read(event: Mapping[str, Any], first: float) -> TraceEvent:
    start = float(event["ts"]) - first
    end = start + max(float(event["dur"]), 0.0)  # clocks that the profiler aligns badly yield negative durations
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError(f"{event['name']!r} starts at {event['ts']} and takes {event['dur']}")
    details = event.get("args")
    call = details.get("correlation") if isinstance(details, dict) else None
    thread = (event.get("pid"), event.get("tid"))
    return TraceEvent(
        _category(event), str(event["name"]), start / 1e6, end / 1e6, thread, call if isinstance(call, int) else None
    )


def device_spans(events: Sequence[TraceEvent]) -> tuple[Spans, list[str]]:
    """Return kernels and copies of the accelerator, and their names.

    Small kernels inside a range of optimizer or router of their stream belong to it. In a trace with only the host's
    ranges, it is those that were launched in one.
    """
    work = [event for event in events if event.category in DEVICE_WORK]
    launches: dict[int | None, TraceEvent] = {}
    ranges = _ranges(events, ("gpu_user_annotation",))
    if not ranges:
        ranges = _ranges(events, ("user_annotation", "cpu_op"))
        launches = {event.correlation: event for event in events if event.category in LAUNCHES and event.correlation}
    return _columns(
        [_Row(event.start, event.end, event.name, _kind(event, launches.get(event.correlation, event), ranges)) for event in work]
    )


Ranges = Mapping[tuple[tuple[Any, Any], WorkClass], Sequence[tuple[float, float]]]
"""Of a stream or thread and a class, in order and apart from each other."""


def _ranges(events: Iterable[TraceEvent], categories: Sequence[str]) -> Ranges:
    found: dict[tuple[tuple[Any, Any], WorkClass], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        for kind, mark in RANGES:
            if event.category in categories and mark.match(event.name):
                found[event.thread, kind].append((event.start, event.end))
    return {key: _joined(entries) for key, entries in found.items()}


def _joined(ranges: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return ranges in order, with those that overlap joined."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _within(event: TraceEvent, ranges: Sequence[tuple[float, float]]) -> bool:
    """Return whether an event lies in one range: a trace has thousands of routers, so this bisects."""
    last = bisect_right(ranges, (event.start, math.inf)) - 1
    return last >= 0 and event.end <= ranges[last][1]


def _kind(event: TraceEvent, place: TraceEvent, ranges: Ranges) -> WorkClass:
    kind = kernel_class(event.name)
    if event.category != "kernel":
        return kind if kind == "communication" else "memory_copy"
    if kind not in {"norm_elementwise", "other"}:
        return kind
    return next((mark for mark, _ in RANGES if _within(place, ranges.get((place.thread, mark), ()))), kind)


def host_spans(events: Sequence[TraceEvent]) -> tuple[Spans, list[str]]:
    """Return operators of the host without nested ones, so that each moment of a thread counts once, and their names."""
    threads: dict[tuple[Any, Any], list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.category == "cpu_op" or _marks(event):
            threads[event.thread].append(event)
    return _columns([row for thread in threads.values() for row in _innermost(thread)])


def _marks(event: TraceEvent) -> bool:
    """Return whether an event is the optimizer's range or a collective of Gloo, which are not cpu_op."""
    return event.category == "user_annotation" and operator_class(event.name) in {"optimizer", "communication"}


@dataclass(slots=True)
class _Open:
    """An event that later ones may be nested in."""

    event: TraceEvent
    kind: WorkClass
    counted: bool = False


def _innermost(thread: list[TraceEvent]) -> list[_Row]:
    """Cut nested events of one thread into the spans in which each is the innermost."""
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


def _columns(rows: Sequence[_Row]) -> tuple[Spans, list[str]]:
    place = {name: number for number, name in enumerate(dict.fromkeys(row.name for row in rows))}
    cells = [(row.start, row.end, CLASSES.index(row.kind), place[row.name], row.begins) for row in rows]
    return np.array(cells, dtype=SPAN), list(place)


def step_windows(events: Sequence[TraceEvent], category: str) -> list[StepWindow]:
    """Return the ProfilerStep# ranges, each up to the start of the next number, so that gaps belong to the step before.

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
    return _in_a_row(found)


def _in_a_row(found: Mapping[int, tuple[float, float]]) -> list[StepWindow]:
    """Return the ranges of numbered steps, each up to the start of the next number."""
    numbers = sorted(found)
    following = {number: found[after][0] for number, after in pairwise(numbers) if after == number + 1}
    return [StepWindow(number, found[number][0], following.get(number, found[number][1])) for number in numbers]


def launched_windows(events: Sequence[TraceEvent]) -> list[StepWindow]:
    """Return the windows of the device's steps by the host's ProfilerStep# ranges in which their work was launched.

    There is none for a trace without launches, or of several processes, which number their launches alike.
    """
    steps = sorted(step_windows(events, "user_annotation"), key=lambda step: step.start)
    processes = {event.thread[0] for event in events if event.category == "user_annotation" and STEP_RANGE.match(event.name)}
    if len(processes) != 1:
        return []
    launches: dict[int | None, float] = {
        event.correlation: event.start for event in events if event.category in LAUNCHES and event.correlation
    }
    starts = [step.start for step in steps]
    found: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.category not in DEVICE_WORK or event.correlation not in launches:
            continue
        at = launches[event.correlation]
        place = bisect_right(starts, at) - 1
        if place >= 0 and at < steps[place].end:
            start, end = found.get(steps[place].number, (event.start, event.end))
            found[steps[place].number] = (min(start, event.start), max(end, event.end))
    return _in_a_row(found)


ORDER: tuple[WorkClass, ...] = (*COMPUTE, "communication", "memory_copy")
"""Where classes overlap, a moment belongs to the first of these: communication counts only where no computation hides it."""
TOP = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """One class of work in a mean step."""

    kind: WorkClass
    seconds: float
    """Of the step, where no class before it in ORDER runs: with the idle time these add up to the step."""
    share: float
    """seconds / step."""
    busy_seconds: float
    """In which it runs at all, hidden or not; kernels that overlap each other count once."""
    calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel, or operator, in a mean step."""

    name: str
    kind: WorkClass
    seconds: float
    """Summed over its calls."""
    share: float
    calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """One profiled step."""

    number: int
    """As training counts, where the trace tells; else the number in ProfilerStep#."""
    seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """A trace of one rank in numbers, as means over its steps."""

    origin: dict[str, Any]
    """Run, model, strategy, platform and rank, where the trace tells."""
    measured_on: Literal["accelerator", "host"]
    """Host: there is no kernel in the trace, and operators of the CPU are counted instead."""
    steps: tuple[ProfiledStep, ...]
    step_seconds: float
    classes: tuple[ClassTime, ...]
    communication_seconds: float
    """In which any collective runs."""
    exposed_communication_seconds: float
    """Of these, where nothing is computed."""
    idle_seconds: float
    """In which nothing runs: no kernel, or on a host no operator."""
    idle_share: float
    top: tuple[KernelTime, ...]
    notes: tuple[str, ...]


def summarise(trace: Mapping[str, Any], *, top: int = TOP) -> ProfileSummary:
    """Summarise a trace as torch's profiler writes it, with its `top` longest kernels.

    Raises:
        MetricError: no event with a duration, or no work inside the steps.
    """
    events = complete_events(trace["traceEvents"])
    on_device = any(event.category in DEVICE_WORK for event in events)
    events, others = _of_one(events, on_device)
    spans, names = device_spans(events) if on_device else host_spans(events)
    if not len(spans):
        raise MetricError("The trace holds no kernel and no operator.", fix="profile at least one whole step")
    windows, notes = _windows(events, spans, on_device)
    notes = (*notes, *others)
    parts = [(window, inside(spans, window.start, window.end)) for window in windows]
    unfinished = trace.get("tprimat_unfinished")
    parts = [(window, part) for window, part in parts if len(part) and window.number != unfinished]
    if unfinished is not None:
        notes = (*notes, "training failed in the last step of the trace, which is left out")
    if not parts:
        raise MetricError("No kernel and no operator runs inside a profiled step.", fix="profile at least one whole step")
    origin = trace.get("tprimat")
    return _summary(origin if isinstance(origin, dict) else {}, parts, on_device, notes, _top(parts, names, top))


def _of_one(events: list[TraceEvent], on_device: bool) -> tuple[list[TraceEvent], tuple[str, ...]]:
    """Return the events of one device, or of one process on a host: others would hide its idle time and communication."""
    measured = ("kernel",) if on_device else ("cpu_op",)
    own = (*DEVICE_WORK, "gpu_user_annotation") if on_device else ("cpu_op", "user_annotation")
    busy: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.category in measured:
            busy[event.thread[0]] += event.end - event.start
    if len(busy) < 2:
        return events, ()
    chosen = max(busy, key=lambda place: busy[place])
    what = "devices" if on_device else "processes"
    note = f"the trace holds {len(busy)} {what}: only {chosen} counts, which works longest"
    return [event for event in events if event.category not in own or event.thread[0] == chosen], (note,)


def _windows(events: Sequence[TraceEvent], spans: Spans, on_device: bool) -> tuple[Sequence[StepWindow], tuple[str, ...]]:
    host = step_windows(events, "user_annotation")
    if not on_device:
        notes = ("no kernel of an accelerator in the trace: classes are of the CPU's operators, idle is time outside them",)
        return (host, notes) if host else ([_whole(spans)], (*notes, NO_STEPS))
    found = (step_windows(events, "gpu_user_annotation"), launched_windows(events))  # the first misses kernels on some ROCm
    if device := next((windows for windows in found if windows and not _ends_in_stub(windows)), None):
        return device, ()
    if device := found[0] or found[1]:
        return device[:-1], ("the trace ends at the beginning of the last step, which is left out",)
    if host:
        return host, ("steps are the host's ranges: the trace has none of the device, whose work may lag behind",)
    return [_whole(spans)], (NO_STEPS,)


STUB = 0.25
"""Of the shortest other step: less than that of the last step was recorded before the profiler stopped."""


def _ends_in_stub(windows: Sequence[StepWindow]) -> bool:
    """Return whether the profiler caught only the beginning of the last step."""
    *before, last = (window.end - window.start for window in windows)
    return bool(before) and last < STUB * min(before)


NO_STEPS = "no ProfilerStep# in the trace: all of it counts as one step"


def _whole(spans: Spans) -> StepWindow:
    return StepWindow(0, float(spans["start"].min()), float(spans["end"].max()))


Part = tuple[StepWindow, Spans]
"""A step, and the spans in it."""


def _mean_step(parts: Sequence[Part]) -> float:
    return sum(window.end - window.start for window, _ in parts) / len(parts)


def _summary(
    origin: dict[str, Any], parts: Sequence[Part], on_device: bool, notes: tuple[str, ...], top: tuple[KernelTime, ...]
) -> ProfileSummary:
    count, step = len(parts), _mean_step(parts)
    own = {kind: sum(_own_seconds(part)[kind] for _, part in parts) / count for kind in ORDER}
    busy = {kind: sum(covered(_of(part, (kind,))) for _, part in parts) / count for kind in ORDER}
    calls = {kind: sum(float(_of(part, (kind,))["begins"].sum()) for _, part in parts) / count for kind in ORDER}
    first = origin.get("step_of_profiler_step_0")
    shift = first if isinstance(first, int) else 0
    idle = step - sum(own.values())
    return ProfileSummary(
        origin=origin,
        measured_on="accelerator" if on_device else "host",
        steps=tuple(
            ProfiledStep(
                number=window.number + shift,
                seconds=window.end - window.start,
                idle_seconds=window.end - window.start - covered(part),
            )
            for window, part in parts
        ),
        step_seconds=step,
        classes=tuple(
            ClassTime(kind=kind, seconds=own[kind], share=own[kind] / step, busy_seconds=busy[kind], calls=calls[kind])
            for kind in ORDER
        ),
        communication_seconds=busy["communication"],
        exposed_communication_seconds=own["communication"],
        idle_seconds=idle,
        idle_share=idle / step,
        top=top,
        notes=notes,
    )


def _of(part: Spans, kinds: Sequence[WorkClass]) -> Spans:
    return part[np.isin(part["kind"], [CLASSES.index(kind) for kind in kinds])]


def _own_seconds(part: Spans) -> dict[WorkClass, float]:
    """Return the time that each class adds to that of the classes before it."""
    reached = [covered(_of(part, ORDER[:number])) for number in range(len(ORDER) + 1)]
    return {kind: reached[number + 1] - reached[number] for number, kind in enumerate(ORDER)}


def covered(spans: Spans) -> float:
    """Return the seconds in which at least one span runs: the length of their union."""
    if not len(spans):
        return 0.0
    ordered = spans[np.argsort(spans["start"], kind="stable")]
    starts, reach = ordered["start"], np.maximum.accumulate(ordered["end"])
    gaps = np.maximum(starts[1:] - reach[:-1], 0.0)
    return float(reach[-1] - starts[0] - gaps.sum())


def _top(parts: Sequence[Part], names: Sequence[str], most: int) -> tuple[KernelTime, ...]:
    """Return the kernels that take most of a step. One name may have two classes, such as elementwise and optimizer."""
    step, kinds = _mean_step(parts), len(CLASSES)
    seconds, calls = np.zeros(len(names) * kinds), np.zeros(len(names) * kinds)
    for _, part in parts:
        key = part["name"] * kinds + part["kind"]
        seconds += np.bincount(key, weights=part["end"] - part["start"], minlength=len(seconds)) / len(parts)
        calls += np.bincount(key, weights=part["begins"], minlength=len(calls)) / len(parts)
    largest = [int(key) for key in np.argsort(-seconds, kind="stable")[:most] if seconds[key] > 0]
    return tuple(
        KernelTime(
            name=names[key // kinds],
            kind=CLASSES[key % kinds],
            seconds=float(seconds[key]),
            share=float(seconds[key]) / step,
            calls=float(calls[key]),
        )
        for key in largest
    )
