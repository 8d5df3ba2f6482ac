"""Show where the throughput of a run went: a waterfall from the dense peak to what was measured, and what would help most."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tprimat.analyze.groups import Measured
from tprimat.analyze.trace import ProfileSummary
from tprimat.analyze.traits import dtype_that_ran, machine_name, on_nodes
from tprimat.analyze.waterfall import Loss, LossName, Waterfall
from tprimat.core import units
from tprimat.core.workload import FullWorkload
from tprimat.predict.rates import Rates
from tprimat.records.store import as_document
from tprimat.report.names import KNOWN_BY, LOSS_NAMES
from tprimat.report.tables import PLAIN, Screen, columns

Unit = Literal["tflops", "ms"]
WIDEST_NAME = 90
"""Letters of a kernel's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would make a part smaller."""

    name: LossName
    words: str
    """The change, or where to look, as a command or as flags of the run's own."""
    gain: float | None = None
    """Tokens/s over those of the run, minus 1, by prediction; None: not predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """A field in which two sides differ."""

    name: str
    here: str
    there: str
    flops: float | None
    """FLOP/s of one GPU that the run has more for it, by prediction, and for routing by the measured load; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Why a run is faster or slower than another, or than a published row. Fields and parts add up to the difference."""

    name: str
    here: float
    there: float
    """FLOP/s of one GPU."""
    apart: tuple[Apart, ...]
    parts: Mapping[str, float]
    """Of what the fields leave: part of a waterfall -> FLOP/s that the run has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A run, where its time went, and what its prediction depends on."""

    measured: Measured
    parts: Waterfall
    trace: ProfileSummary | None
    workload: FullWorkload | None
    """None: its record does not say all of it, or nothing predicts its engine."""
    rates: Rates | None
    advice: tuple[Advice, ...] = ()
    """For the largest parts."""
    against: Against | None = None


def title_of(found: Explanation) -> str:
    """Name a run and say how fast it was."""
    run, parts = found.measured.result.run, found.parts
    who = ", ".join(filter(None, (f"{run.model} {run.strategy or ''}".strip(), run.engine, dtype_that_ran(run))))
    where = f"{who} on {machine_name(run)}{on_nodes(run)}"
    if parts.peak_flops is None or parts.flops is None:
        return f"{where}: {units.seconds(parts.step_seconds)} a step"
    return (
        f"{where}: {parts.flops / 1e12:,.0f} of {units.teraflops(parts.peak_flops)} per GPU, "
        f"{units.percent(parts.flops / parts.peak_flops)}; {units.seconds(parts.step_seconds)} a step"
    )


def unit_of(parts: Waterfall, asked: Unit) -> Unit:
    """Return the unit of a waterfall: without a peak there are only milliseconds."""
    return asked if parts.peak_flops else "ms"


def amount(parts: Waterfall, loss: Loss, unit: Unit) -> float:
    """Return a part in the unit: TFLOP/s per GPU, or ms of a step."""
    flops = parts.flops_of(loss)
    return loss.seconds * 1e3 if unit == "ms" or flops is None else flops / 1e12


def signed(value: float, digits: int = 1) -> str:
    """Format a part with its sign; what rounds to zero has none."""
    rounded = round(value, digits)
    return f"{rounded:+,.{digits}f}" if rounded else f"{0:.{digits}f}"


def largest(parts: Waterfall, most: int = 3) -> list[Loss]:
    """Return the largest parts, without the rest."""
    named = [loss for loss in parts.losses if loss.name != "rest" and loss.seconds > 0]
    return sorted(named, key=lambda loss: -loss.seconds)[:most]


def lost_most(parts: Waterfall) -> list[str]:
    """Return three lines for the end of a run's summary: the largest parts; none where no peak is known."""
    return [
        f"  {'' if number else 'lost most to':<14} {LOSS_NAMES[loss.name]}: {amount(parts, loss, 'tflops'):,.0f} TFLOP/s/GPU, "
        + KNOWN_BY[loss.known_by]
        for number, loss in enumerate(largest(parts) if parts.peak_flops else ())
    ]


def rows(parts: Waterfall, unit: Unit) -> list[list[str]]:
    """Return a row for the peak, each part, and what was measured: name, how it is known, amount, share."""
    sign = 1 if unit == "ms" else -1
    whole = parts.step_seconds if unit == "ms" else parts.step_seconds - parts.at_peak_seconds
    table = []
    if parts.peak_flops and parts.flops:
        first = parts.at_peak_seconds * 1e3 if unit == "ms" else parts.peak_flops / 1e12
        table.append(["at the dense peak", "data sheet", f"{first:,.1f}", ""])
    for loss in parts.losses:
        value = sign * amount(parts, loss, unit)
        share = units.percent(loss.seconds / whole) if whole else ""
        table.append([LOSS_NAMES[loss.name], known(loss), signed(value), share])
    last = parts.step_seconds * 1e3 if unit == "ms" else (parts.flops or 0) / 1e12
    return [*table, ["measured", KNOWN_BY["run"], f"{last:,.1f}", ""]]


def known(loss: Loss) -> str:
    """Say how a part is known, and from what."""
    return f"{KNOWN_BY[loss.known_by]} ({loss.source})"


def text(found: Explanation, asked: Unit, screen: Screen = PLAIN) -> str:
    """Format a waterfall, what would help with its largest parts, and the kernels of a trace."""
    parts, unit = found.parts, unit_of(found.parts, asked)
    header = ["part", "known by", *(("ms of a step", "of the step") if unit == "ms" else ("TFLOP/s/GPU", "of the loss"))]
    lines = [screen.prose(title_of(found), 2, "heading"), "", columns(header, rows(parts, unit), left=2, screen=screen)]
    if rest := rest_words(parts, unit):
        lines += ["", screen.prose(rest, 2, "warning")]
    lines += ["", *(screen.prose(one, 2) for one in advised(found, unit))]
    lines += _against_lines(found.against, screen) if found.against else []
    if found.trace is not None:
        kernels = [
            [one.name if len(one.name) <= WIDEST_NAME else f"{one.name[: WIDEST_NAME - 1]}…", units.seconds(one.seconds)]
            for one in found.trace.top
        ]
        lines += ["", columns(["kernel", "a step"], kernels, screen=screen)]
    return "\n".join(lines)


def _against_lines(found: Against, screen: Screen) -> list[str]:
    """Format what two sides differ in, what it is worth, and what is left."""
    title = f"{found.here / 1e12:,.0f} against {found.there / 1e12:,.0f} TFLOP/s/GPU of {found.name}"
    body = [
        [one.name, one.here, one.there, units.ABSENT if one.flops is None else signed(one.flops / 1e12)] for one in found.apart
    ]
    body += [[LOSS_NAMES[name], "", "", signed(size / 1e12)] for name, size in found.parts.items()]  # type: ignore[index]
    header = ["difference", "here", "there", "TFLOP/s/GPU"]
    return ["", screen.prose(title, 2, "heading"), "", columns(header, body, left=3, screen=screen)]


def rest_words(parts: Waterfall, unit: Unit) -> str:
    """Say that the parts are longer than the step, where they are."""
    rest = parts.losses[-1]
    if rest.seconds >= -0.005 * parts.step_seconds:
        return ""
    over = f"{-amount(parts, rest, unit):,.1f} {'ms' if unit == 'ms' else 'TFLOP/s'}"
    return f"The parts together are {over} more than the step lost: what is predicted was faster in the run, or is counted twice."


def advised(found: Explanation, asked: Unit = "tflops") -> list[str]:
    """Say what would make the largest parts smaller, and what the run would gain by prediction."""
    unit, lines = unit_of(found.parts, asked), []
    for advice in found.advice:
        loss = next(one for one in found.parts.losses if one.name == advice.name)
        size = f"{amount(found.parts, loss, unit):,.0f} {'ms' if unit == 'ms' else 'TFLOP/s'}"
        gain = "" if advice.gain is None else f" ({units.signed_percent(advice.gain)} tokens/s, predicted)"
        lines.append(f"{LOSS_NAMES[advice.name]}, {size}: {advice.words}{gain}")
    return lines


def document(found: Explanation) -> dict[str, Any]:
    """Return a waterfall as data, in seconds and FLOP/s."""
    whole = as_document(found.parts)
    for row, loss in zip(whole["losses"], found.parts.losses, strict=True):
        row["flops"] = found.parts.flops_of(loss)
    return {
        "run_id": found.measured.result.run.run_id,
        "path": str(found.measured.result.path),
        **whole,
        "advice": [as_document(one) for one in found.advice],
        "against": None if found.against is None else as_document(found.against),
        "trace": None if found.trace is None else as_document(found.trace),
    }
