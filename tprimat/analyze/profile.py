"""What one step of training spends its time on, from a trace of torch's profiler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tprimat.analyze.kernels import COMPUTE, WorkClass
from tprimat.analyze.spans import (
    CLASSES,
    DEVICE_WORK,
    Floats,
    Spans,
    StepWindow,
    complete_events,
    device_spans,
    host_spans,
    step_windows,
)
from tprimat.errors import MetricError

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
    """A trace in numbers.

    Args:
        trace: as torch's profiler writes it; record.trace.read_trace reads one.
        top: how many kernels to name.

    Raises:
        MetricError: no event with a duration, or no work inside the steps.
    """
    events = complete_events(trace["traceEvents"])
    on_device = any(event.category in DEVICE_WORK for event in events)
    spans = device_spans(events) if on_device else host_spans(events)
    if not len(spans.starts):
        raise MetricError("The trace holds no kernel and no operator.", fix="profile at least one whole step")
    windows, notes = _windows(
        step_windows(events, "user_annotation"), step_windows(events, "gpu_user_annotation"), spans, on_device
    )
    parts = [(window, spans.inside(window.start, window.end)) for window in windows]
    unfinished = trace.get("tprimat_unfinished")
    parts = [(window, part) for window, part in parts if len(part.starts) and window.number != unfinished]
    if unfinished is not None:
        notes = (*notes, "training failed in the last step of the trace, which is left out")
    if not parts:
        raise MetricError("No kernel and no operator runs inside a profiled step.", fix="profile at least one whole step")
    origin = trace.get("tprimat")
    return _summary(origin if isinstance(origin, dict) else {}, parts, on_device, notes, top)


def _windows(
    host: Sequence[StepWindow], device: Sequence[StepWindow], spans: Spans, on_device: bool
) -> tuple[Sequence[StepWindow], tuple[str, ...]]:
    if not on_device:
        notes = ("no kernel of an accelerator in the trace: classes are of the CPU's operators, idle is time outside them",)
        return (host, notes) if host else ([_whole(spans)], (*notes, NO_STEPS))
    if device:
        return device, ()
    if host:
        return host, ("steps are the host's ranges: the trace has none of the device, whose work may lag behind",)
    return [_whole(spans)], (NO_STEPS,)


NO_STEPS = "no ProfilerStep# in the trace: all of it counts as one step"


def _whole(spans: Spans) -> StepWindow:
    return StepWindow(0, float(spans.starts.min()), float(spans.ends.max()))


def _summary(
    origin: dict[str, Any], parts: Sequence[tuple[StepWindow, Spans]], on_device: bool, notes: tuple[str, ...], top: int
) -> ProfileSummary:
    count = len(parts)
    step = sum(window.end - window.start for window, _ in parts) / count
    own = {kind: sum(_own_seconds(part)[kind] for _, part in parts) / count for kind in ORDER}
    busy = {kind: sum(covered(_of(part, (kind,))) for _, part in parts) / count for kind in ORDER}
    calls = {kind: sum(float(_of(part, (kind,)).calls.sum()) for _, part in parts) / count for kind in ORDER}
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
        top=_top(parts, step, top),
        notes=notes,
    )


def _of(part: Spans, kinds: Sequence[WorkClass]) -> Spans:
    return part.where(np.isin(part.kinds, [CLASSES.index(kind) for kind in kinds]))


def _own_seconds(part: Spans) -> dict[WorkClass, float]:
    """What each class adds to the time that the classes before it cover."""
    reached = [covered(_of(part, ORDER[:number])) for number in range(len(ORDER) + 1)]
    return {kind: reached[number + 1] - reached[number] for number, kind in enumerate(ORDER)}


def covered(spans: Spans) -> float:
    """Seconds in which at least one span runs: the length of their union."""
    if not len(spans.starts):
        return 0.0
    order = np.argsort(spans.starts, kind="stable")
    starts: Floats = spans.starts[order]
    reach: Floats = np.maximum.accumulate(spans.ends[order])
    gaps = np.maximum(starts[1:] - reach[:-1], 0.0)
    return float(reach[-1] - starts[0] - gaps.sum())


def _top(parts: Sequence[tuple[StepWindow, Spans]], step: float, most: int) -> tuple[KernelTime, ...]:
    """The kernels that take most of a step. One name may be of two classes: an elementwise kernel inside the optimizer is its."""
    texts, kinds = parts[0][1].texts, len(CLASSES)
    seconds, calls = np.zeros(len(texts) * kinds), np.zeros(len(texts) * kinds)
    for _, part in parts:
        key = part.names * kinds + part.kinds
        seconds += np.bincount(key, weights=part.ends - part.starts, minlength=len(seconds)) / len(parts)
        calls += np.bincount(key, weights=part.calls, minlength=len(calls)) / len(parts)
    largest = [int(key) for key in np.argsort(-seconds, kind="stable")[:most] if seconds[key] > 0]
    return tuple(
        KernelTime(
            name=texts[key // kinds],
            kind=CLASSES[key % kinds],
            seconds=float(seconds[key]),
            share=float(seconds[key]) / step,
            calls=float(calls[key]),
        )
        for key in largest
    )
