"""Time of each class of work in a training step, from a trace of torch's profiler.

The name of a kernel decides its class (data/kernels.yaml). Times are seconds from the first event of the trace, whose own are in
microseconds (Chrome's Trace Event Format).
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tprimat.core.errors import MetricError
from tprimat.core.rows import DATA, document

Compute = Literal["matmul", "expert_matmul", "router", "permute", "attention", "norm_elementwise", "optimizer", "other"]
"""Classes that can hide communication."""
WorkClass = Literal[Compute, "communication", "memory_copy"]
CLASSES: tuple[WorkClass, ...] = get_args(WorkClass)
"""Where classes overlap, a moment belongs to the first of these: communication counts only where no computation hides it."""
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of work on an accelerator, for CUPTI and ROCm."""
LAUNCHES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver")
"""Calls on the host, HIP's under the names of CUDA's; a kernel has the correlation of the call that launched it."""
READ = (*DEVICE_WORK, *LAUNCHES, "gpu_user_annotation", "user_annotation", "cpu_op")
WANTED = re.compile(
    rb"""\n  (\{\s+"ph": "X",\s+"cat": "(?:(?:kernel|gpu_mem\w+|(?:cuda|xpu)_(?:runtime|driver)|(?:gpu_)?user_annotation)"|"""
    rb"""cpu_op",\s+"name": "(?:[Oo]ptimizer|enumerate)).*?\n  \})""",
    re.DOTALL,
)
"""Finds the events that a summary uses in Kineto's text: of the host's operations only those with a name from below."""
OPTIMIZER = re.compile(r"optimizer_step$|Optimizer\.step#")
"""Marks the ranges, of Megatron's step and of torch's optimizers, whose small kernels belong to the optimizer."""
STEP_RANGE = re.compile(r"ProfilerStep#(\d+)$")
SPAN = np.dtype([("start", "f8"), ("end", "f8"), ("kind", "i8"), ("name", "i8"), ("joins", "i8"), ("launched", "f8")])
"""One span: its kind counts in CLASSES, its name in the names of all spans, `joins` in JOINED, of which the last is unknown.
`launched`: when the host began to launch it; NaN where the trace does not tell."""
JOINED: tuple[tuple[str, str], ...] = (*document(DATA / "kernels.yaml")["joined"].items(), ("", ""))
"""The ranks that communication joins, by the description of their group, which Kineto copies, or by the kernel's name."""
LOADING = re.compile(r"enumerate\(DataLoader\)#")
"""Marks a host that waits for torch's loader."""
Spans = npt.NDArray[np.void]
"""Of dtype SPAN, shape (n,)."""


@cache
def _kernel_patterns() -> tuple[tuple[re.Pattern[str], WorkClass], ...]:
    rows = [(row["pattern"], row["class"]) for row in document(DATA / "kernels.yaml")["kernels"]]
    return tuple((re.compile(text if isinstance(text, str) else "|".join(text)), kind) for text, kind in rows)


@cache
def kernel_class(name: str) -> WorkClass:
    """Return the class of a kernel on an accelerator."""
    small = name.lower()
    return next((kind for pattern, kind in _kernel_patterns() if pattern.search(small)), "other")


def inside(spans: Spans, start: float, end: float) -> Spans:
    """Return the spans that reach into a window, cut at its ends."""
    part = spans[(spans["end"] > start) & (spans["start"] < end)]
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
    group: str = ""
    """Description of the ranks that communicate."""


def complete_events(events: Iterable[Any]) -> list[TraceEvent]:
    """Return the events with a duration in the categories that a summary uses."""
    whole = [one for one in events if isinstance(one, dict) and one.get("ph") == "X" and one.get("cat") in READ and "name" in one]
    try:
        first = min((float(event["ts"]) for event in whole), default=0.0)
        return [_read(event, first) for event in whole]
    except (KeyError, TypeError, ValueError) as error:
        raise MetricError("An event of the trace has no start or duration in microseconds.", why=repr(error)) from error


def _read(event: Mapping[str, Any], first: float) -> TraceEvent:
    start = float(event["ts"]) - first
    end = start + max(float(event["dur"]), 0.0)  # clocks that the profiler aligns badly yield negative durations
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError(f"{event['name']!r} starts at {event['ts']} and takes {event['dur']}")
    details = event.get("args")
    call = details.get("correlation") if isinstance(details, dict) else None
    group = str(details.get("Process Group Description", "")) if isinstance(details, dict) else ""
    thread = (event.get("pid"), event.get("tid"))
    call = call if isinstance(call, int) else None
    return TraceEvent(event["cat"], str(event["name"]), start / 1e6, end / 1e6, thread, call, group)


def device_spans(events: Sequence[TraceEvent]) -> tuple[Spans, list[str]]:
    """Return kernels and copies of the accelerator, and their names.

    Small kernels inside a range of the optimizer of their stream belong to it. In a trace with only the host's ranges, it is
    those that were launched in one.
    """
    launches, on_device = _launches(events), _ranges(events, ("gpu_user_annotation",))
    ranges = on_device or _ranges(events, ("user_annotation", "cpu_op"))
    work = [event for event in events if event.category in DEVICE_WORK]
    place = {name: number for number, name in enumerate(dict.fromkeys(event.name for event in work))}
    cells = []
    for event in work:
        launch = launches.get(event.correlation)
        kind = _kind(event, event if on_device or launch is None else launch, ranges)
        joins, launched = _joins(f"{event.group} {event.name}"), math.nan if launch is None else launch.start
        cells.append((event.start, event.end, CLASSES.index(kind), place[event.name], joins, launched))
    return np.array(cells, dtype=SPAN), list(place)


def _launches(events: Iterable[TraceEvent]) -> dict[int | None, TraceEvent]:
    return {event.correlation: event for event in events if event.category in LAUNCHES and event.correlation}


@cache
def _joins(words: str) -> int:
    return next(number for number, (_, pattern) in enumerate(JOINED) if re.search(pattern, words.lower()))


def _ranges(events: Iterable[TraceEvent], categories: Sequence[str]) -> list[TraceEvent]:
    return [event for event in events if event.category in categories and OPTIMIZER.match(event.name)]


def _kind(event: TraceEvent, place: TraceEvent, ranges: Sequence[TraceEvent]) -> WorkClass:
    kind = kernel_class(event.name)
    if event.category != "kernel":
        return kind if kind == "communication" else "memory_copy"
    small = kind in {"norm_elementwise", "other"}
    inside_one = small and any(one.thread == place.thread and one.start <= place.start and place.end <= one.end for one in ranges)
    return "optimizer" if inside_one else kind


def step_windows(events: Sequence[TraceEvent]) -> list[StepWindow]:
    """Return the device's steps, each up to the start of the next number, so that gaps belong to the step before.

    A step is the work that was launched in the host's ProfilerStep# range, since the device's own ranges miss kernels on some
    ROCm; those are used where a trace holds no launches.
    """
    host = sorted(_numbered(events, "user_annotation").items(), key=lambda step: step[1])
    launches = _launches(events)
    starts = [start for _, (start, _) in host]
    spans: dict[int, tuple[float, float]] = {}
    for event in events if host else ():
        if event.category in DEVICE_WORK and event.correlation in launches:
            at = launches[event.correlation].start
            number, (_, end) = host[max(bisect_right(starts, at) - 1, 0)]
            if starts[0] <= at < end:
                _extend(spans, number, event)
    spans = spans or _numbered(events, "gpu_user_annotation")
    numbers = sorted(spans)
    following = {number: spans[after][0] for number, after in pairwise(numbers) if after == number + 1}
    return [StepWindow(number, spans[number][0], following.get(number, spans[number][1])) for number in numbers]


def _numbered(events: Sequence[TraceEvent], category: str) -> dict[int, tuple[float, float]]:
    """Return the ProfilerStep# ranges of a category by number; those of a device, one a stream, are joined."""
    spans: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.category == category and (match := STEP_RANGE.match(event.name)):
            _extend(spans, int(match[1]), event)
    return spans


def _extend(spans: dict[int, tuple[float, float]], number: int, event: TraceEvent) -> None:
    start, end = spans.get(number, (event.start, event.end))
    spans[number] = (min(start, event.start), max(end, event.end))


TOP = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """One class of work in a mean step."""

    kind: WorkClass
    seconds: float
    """Of the step, where no class before it in CLASSES runs: with the idle time these add up to the step."""
    busy_seconds: float
    """In which it runs at all, hidden or not; kernels that overlap each other count once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel in a mean step."""

    name: str
    kind: WorkClass
    seconds: float
    """Summed over its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """A trace of one rank in numbers, as means over its steps."""

    origin: dict[str, Any]
    """Run, model, strategy, platform and rank, where the trace tells."""
    steps: tuple[dict[str, float], ...]
    """number, as training counts where the trace tells, and seconds of each."""
    step_seconds: float
    classes: tuple[ClassTime, ...]
    exposed_communication_seconds: float
    """Of collectives, where nothing is computed."""
    idle_seconds: float
    """In which no kernel runs."""
    exchanges: dict[str, float] = field(default_factory=dict)
    """Exposed communication by the ranks that it joins (tensor, context, experts, pipeline, replicas), where the trace tells."""
    data_seconds: float = 0.0
    """Of the idle time, while the host waits for torch's loader."""
    between_seconds: float = 0.0
    """Of the idle time, before work that the host had launched in time: no host is late there."""
    top: tuple[KernelTime, ...]


TracePart = tuple[StepWindow, Spans]
"""A step, and the spans in it."""


def summarize(trace: Mapping[str, Any]) -> ProfileSummary:
    """Summarize a trace as torch's profiler writes it, with its longest kernels."""
    events = complete_events(trace["traceEvents"])
    spans, names = device_spans(events)
    if not len(spans):
        raise MetricError("The trace holds no kernel.", fix="profile at least one whole step on a GPU")
    windows = step_windows(events)
    if not windows:
        windows = [StepWindow(0, float(spans["start"].min()), float(spans["end"].max()))]
    parts = [(window, inside(spans, window.start, window.end)) for window in windows]
    parts = [(window, part) for window, part in parts if len(part)]
    if not parts:
        raise MetricError("No kernel runs inside a profiled step.", fix="profile at least one whole step")
    loading = np.array([(event.start, event.end, 0, 0, 0, 0) for event in events if LOADING.match(event.name)], dtype=SPAN)

    def mean(value: Callable[[StepWindow, Spans], float]) -> float:
        return sum(value(window, part) for window, part in parts) / len(parts)

    origin = trace["tprimat"] if isinstance(trace.get("tprimat"), dict) else {}
    first = origin.get("step_of_profiler_step_0")
    shift = first if isinstance(first, int) else 0
    step, own = mean(lambda window, _: window.end - window.start), [_own_seconds(part) for _, part in parts]
    classes = tuple(
        ClassTime(
            kind=kind,
            seconds=sum(seconds[kind] for seconds in own) / len(parts),
            busy_seconds=mean(lambda _, part, kind=kind: covered(_of(part, (kind,)))),  # type: ignore[misc]
        )
        for kind in CLASSES
    )
    exposed = [_exposed(part) for _, part in parts]
    return ProfileSummary(
        origin=origin,
        steps=tuple({"number": window.number + shift, "seconds": window.end - window.start} for window, _ in parts),
        step_seconds=step,
        classes=classes,
        exposed_communication_seconds=next(one.seconds for one in classes if one.kind == "communication"),
        idle_seconds=step - sum(one.seconds for one in classes),
        exchanges={name: sum(seconds[name] for seconds in exposed) / len(parts) for name, _ in JOINED if name},
        data_seconds=mean(
            lambda window, part: covered(np.append(part, inside(loading, window.start, window.end))) - covered(part)
        ),
        between_seconds=mean(lambda _, part: _between(part)),
        top=_top(parts, names),
    )


def _of(part: Spans, kinds: Sequence[WorkClass]) -> Spans:
    return part[np.isin(part["kind"], [CLASSES.index(kind) for kind in kinds])]


def _own_seconds(part: Spans) -> dict[WorkClass, float]:
    """Return the time that each class adds to that of the classes before it."""
    reached = [covered(_of(part, CLASSES[:number])) for number in range(len(CLASSES) + 1)]
    return {kind: reached[number + 1] - reached[number] for number, kind in enumerate(CLASSES)}


def _exposed(part: Spans) -> dict[str, float]:
    """Return the exposed communication of each group of ranks, where several overlap of the first."""
    computed, exchanged = _of(part, get_args(Compute)), _of(part, ("communication",))
    reached = [covered(np.append(computed, exchanged[exchanged["joins"] < number])) for number in range(len(JOINED) + 1)]
    return {name: reached[number + 1] - reached[number] for number, (name, _) in enumerate(JOINED)}


def covered(spans: Spans) -> float:
    """Return the seconds in which at least one span runs: the length of their union."""
    if not len(spans):
        return 0.0
    ordered, gaps = _gaps(spans)
    return float(ordered["end"].max() - ordered["start"][0] - gaps.sum())


def _gaps(spans: Spans) -> tuple[Spans, npt.NDArray[np.float64]]:
    """Return spans by their start, shape (n,), and the seconds before each but the first in which none runs, (n - 1,)."""
    ordered = spans[np.argsort(spans["start"], kind="stable")]
    return ordered, np.maximum(ordered["start"][1:] - np.maximum.accumulate(ordered["end"])[:-1], 0.0)


def _between(part: Spans) -> float:
    """Return the seconds of gaps that end with work launched so early that it could have run before the gap.

    A launch takes as long as the shortest of the step.
    """
    ordered, gaps = _gaps(part)
    delays = ordered["start"] - ordered["launched"]
    least = np.min(delays, initial=np.inf, where=~np.isnan(delays))
    return float(gaps[delays[1:] >= gaps + least].sum())


def _top(parts: Sequence[TracePart], names: Sequence[str]) -> tuple[KernelTime, ...]:
    """Return the kernels that take most of a step. One name may have two classes, such as elementwise and optimizer."""
    kinds, spans = len(CLASSES), np.concatenate([part for _, part in parts])
    seconds = np.bincount(spans["name"] * kinds + spans["kind"], weights=spans["end"] - spans["start"]) / len(parts)
    largest = [int(key) for key in np.argsort(-seconds, kind="stable")[:TOP] if seconds[key] > 0]
    return tuple(KernelTime(name=names[key // kinds], kind=CLASSES[key % kinds], seconds=float(seconds[key])) for key in largest)
