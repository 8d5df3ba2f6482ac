"""Show where the throughput of a run went: a waterfall from the dense peak to what was measured, and what would help most."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tprimat.analyze.groups import Measured
from tprimat.analyze.trace import ProfileSummary
from tprimat.analyze.traits import dtype_that_ran, machine_name, on_nodes
from tprimat.analyze.waterfall import Known, Loss, LossName, Waterfall
from tprimat.core import units
from tprimat.core.units import signed
from tprimat.core.workload import FullWorkload
from tprimat.predict.rates import Rates
from tprimat.records.store import as_document
from tprimat.report.names import KNOWN_BY, LOSS_NAMES
from tprimat.report.tables import PLAIN, Screen, columns
from tprimat.report.words import not_counted_words

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
    fits: bool = True
    """Else its memory is too tight to promise."""
    remark: str = ""
    """Why there is no better way, or how the part may be read."""


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
    low: float | None = None
    """Beside a published row: what nine of ten such runs exceed; None: nothing predicts the run."""
    high: float | None = None

    @property
    def within(self) -> bool | None:
        """Whether the run is as fast as expected from the row; None: not known."""
        return None if self.low is None or self.high is None else self.low <= self.here <= self.high


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


def named(explanation: Explanation) -> str:
    """Name a run, what it trained in, and its machine."""
    run = explanation.measured.result.run
    who = ", ".join(filter(None, (f"{run.model} {run.strategy or ''}".strip(), run.engine, dtype_that_ran(run))))
    return f"{who} on {machine_name(run)}{on_nodes(run)}{'' if explanation.measured.counts else ' (not counted)'}"


def speed_of(parts: Waterfall) -> str:
    """Say how fast a run was, and what part of the peak that is."""
    step = f"{units.seconds(parts.step_seconds)} a step"
    if parts.peak_flops is None or parts.flops is None:
        return step
    share = units.percent(parts.flops / parts.peak_flops)
    return f"{parts.flops / 1e12:,.0f} of {units.teraflops(parts.peak_flops)} per GPU, {share}; {step}"


def unit_of(parts: Waterfall, asked: Unit) -> Unit:
    """Return the unit of a waterfall: without a peak there are only milliseconds."""
    return asked if parts.peak_flops else "ms"


def amount(parts: Waterfall, loss: Loss, unit: Unit) -> float:
    """Return a part in the unit: TFLOP/s per GPU, or ms of a step."""
    flops = parts.flops_of(loss)
    return loss.seconds * 1e3 if unit == "ms" or flops is None else flops / 1e12


def largest(parts: Waterfall, most: int = 3) -> list[Loss]:
    """Return the largest parts; the rest only where it is larger than each of them."""
    by_size = sorted((loss for loss in parts.losses if loss.seconds > 0), key=lambda loss: -loss.seconds)
    return [loss for place, loss in enumerate(by_size) if loss.name != "rest" or place == 0][:most]


def lost_most(parts: Waterfall) -> list[str]:
    """Return three lines for the end of a run's summary: the largest parts; none where no peak is known."""
    return [
        f"  {'' if number else 'lost most to':<14} {LOSS_NAMES[loss.name]}: {amount(parts, loss, 'tflops'):,.0f} TFLOP/s/GPU, "
        + KNOWN_BY[loss.known_by]
        for number, loss in enumerate(largest(parts) if parts.peak_flops else ())
    ]


class WaterfallBar(NamedTuple):
    """One row of a waterfall: the peak, a part with its sign, or what was measured."""

    name: str
    known_by: Known | Literal["base"]
    source: str
    amount: float
    share: float | None = None
    """Of what is lost, or of the step in ms; None: no part."""

    def shown(self, digits: int) -> str:
        """Format the amount."""
        return f"{self.amount:,.{digits}f}" if self.share is None else signed(self.amount, digits)


def bars(parts: Waterfall, unit: Unit) -> list[WaterfallBar]:
    """Return the rows of a waterfall, which the table and the picture show."""
    whole, sign, first, last = parts.step_seconds, 1, parts.at_peak_seconds * 1e3, parts.step_seconds * 1e3
    if unit == "tflops":
        whole, sign, first, last = whole - parts.at_peak_seconds, -1, (parts.peak_flops or 0) / 1e12, (parts.flops or 0) / 1e12
    rows = [WaterfallBar("at the dense peak", "base", "", first)] if parts.peak_flops else []
    for loss in parts.losses:
        size, share = sign * amount(parts, loss, unit), loss.seconds / whole if whole else 0.0
        rows.append(WaterfallBar(LOSS_NAMES[loss.name], loss.known_by, loss.source, size, share))
    return [*rows, WaterfallBar("measured", "run", "", last)]


def text(explanation: Explanation, asked: Unit, screen: Screen = PLAIN) -> str:
    """Format a waterfall, what would help with its largest parts, and the kernels of a trace."""
    parts, unit = explanation.parts, unit_of(explanation.parts, asked)
    header = ["part", "source", *(("ms of a step", "of the step") if unit == "ms" else ("TFLOP/s/GPU", "of the gap"))]
    rows = []
    for bar in bars(parts, unit):
        known = KNOWN_BY[bar.known_by] + (f" ({bar.source})" if bar.source else "")
        rows.append([bar.name, known, bar.shown(1), "" if bar.share is None else units.percent(bar.share)])
    title = [f"{named(explanation)}: {speed_of(parts)}", not_counted_words(explanation.measured)]
    lines = [*(screen.prose(one, 2) for one in title if one), "", columns(header, rows, left=2, screen=screen)]
    lines += ["", *(screen.prose(one, 2) for one in advised(explanation, unit))]
    if explanation.against:
        lines += against_lines(explanation.against, screen, parts.step_seconds if unit == "ms" else None)
    if explanation.trace is not None:
        most = min(WIDEST_NAME, (screen.width or 2 * WIDEST_NAME) - 11)
        kernels = [
            [one.name if len(one.name) <= most else f"{one.name[: most - 1]}…", units.seconds(one.seconds)]
            for one in explanation.trace.top
        ]
        lines += ["", columns(["kernel", "a step"], kernels, screen=screen)]
    return "\n".join(lines)


def against_lines(against: Against, screen: Screen, step_seconds: float | None = None) -> list[str]:
    """Format what two sides differ in, what it is worth, and what is left: in TFLOP/s per GPU, or in ms of the run's step.

    The other side takes here / there times as long for the same work, which turns the FLOP/s of a part into its seconds.
    """
    scale = 1e-12 if step_seconds is None else -1e3 * step_seconds / against.there
    usually = "" if "rest" in against.parts else " expected"
    title = f"{against.here / 1e12:,.0f}{usually} against {against.there / 1e12:,.0f} TFLOP/s/GPU of {against.name}"
    body = [
        [one.name, one.here, one.there, units.ABSENT if one.flops is None else signed(one.flops * scale)] for one in against.apart
    ]
    body += [[LOSS_NAMES[name], "", "", signed(size * scale)] for name, size in against.parts.items()]
    header = ["difference", "here", "there", "TFLOP/s/GPU" if step_seconds is None else "ms of a step"]
    lines = ["", screen.prose(title, 2), "", columns(header, body, left=3, screen=screen)]
    if against.low is not None and against.high is not None:
        usual, low, high = (value / 1e12 for value in (against.here - against.parts.get("rest", 0.0), against.low, against.high))
        lines += ["", f"expected: {usual:,.0f} TFLOP/s/GPU, nine of ten runs from {low:,.0f} to {high:,.0f}"]
    return lines


def advised(explanation: Explanation, asked: Unit = "tflops") -> list[str]:
    """Say what would make the largest parts smaller, and what the run would gain by prediction."""
    unit, told = unit_of(explanation.parts, asked), dict[str, list[str]]()
    for advice in explanation.advice:
        loss = next(one for one in explanation.parts.losses if one.name == advice.name)
        size = f"{amount(explanation.parts, loss, unit):,.0f} {'ms' if unit == 'ms' else 'TFLOP/s'}"
        tight = "" if advice.fits else "; memory too tight to promise"
        gain = "" if advice.gain is None else f" ({units.signed_percent(advice.gain)} tokens/s, predicted{tight})"
        again = "run again with " if advice.words.startswith("--") else ""
        remark = f"; {advice.remark}" if advice.remark else ""
        told.setdefault(f"{again}{advice.words}{gain}{remark}", []).append(f"{LOSS_NAMES[advice.name]}, {size}")
    return [f"{' and '.join(parts)}: {said}" for said, parts in told.items()]


def document(explanation: Explanation) -> dict[str, Any]:
    """Return a waterfall as data, in seconds and FLOP/s."""
    whole = as_document(explanation.parts)
    for row, loss in zip(whole["losses"], explanation.parts.losses, strict=True):
        row["flops"] = explanation.parts.flops_of(loss)
    return {
        "run_id": explanation.measured.result.run.run_id,
        "path": str(explanation.measured.result.path),
        "not_counted": not_counted_words(explanation.measured) or None,
        **whole,
        "advice": [as_document(one) for one in explanation.advice],
        "against": None if explanation.against is None else as_document(explanation.against),
        "trace": None if explanation.trace is None else as_document(explanation.trace),
    }


# The same as a picture: SVG, which follows the reader's light or dark colors, a file of its own or part of the page.

WIDTH, ROW = 800, 23
LABELS, BARS, VALUES, NOTES = 12, 205, 618, 630
"""Where labels, bars and notes begin, and where numbers end, in pixels."""
ROOM = 355
"""Pixels of the longest bar."""


def svg(explanation: Explanation, asked: Unit = "tflops") -> str:
    """Return the picture; readable at 800 pixels."""
    unit, who = unit_of(explanation.parts, asked), named(explanation)
    rows, at, spans = bars(explanation.parts, unit), 0.0, []
    for bar in rows:
        start = 0.0 if bar.share is None else at
        at = start + bar.amount
        spans.append((start, at))
    low, high = min(map(min, spans)), max(map(max, spans))
    scale = ROOM / (high - low)
    lines = [f'<text x="{LABELS}" y="22" class="wf-head">{escape(who)}</text>']
    speed = escape(speed_of(explanation.parts)) + (" (in ms)" if unit == "ms" else "")
    lines.append(f'<text x="{LABELS}" y="41" class="wf-soft">{speed}</text>')
    for row, (bar, (start, end)) in enumerate(zip(rows, spans, strict=True)):
        top = 54 + row * ROW
        left, width = BARS + (min(start, end) - low) * scale, max(1.5, abs(end - start) * scale)
        lines += [
            f'<text x="{LABELS}" y="{top + 14}">{escape(bar.name)}</text>',
            f'<rect x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{ROW - 7}" rx="2" class="wf-{bar.known_by}"/>',
            f'<text x="{VALUES}" y="{top + 14}" text-anchor="end">{escape(bar.shown(0))}</text>',
            f'<text x="{NOTES}" y="{top + 14}" class="wf-soft">{escape(KNOWN_BY[bar.known_by])}</text>',
        ]
    height = 62 + len(rows) * ROW
    label = escape(f"Waterfall of {who}: {units.seconds(explanation.parts.step_seconds)} a step, by part.")
    style = Path(__file__).with_name("waterfall.css").read_text(encoding="utf8").replace("\n", "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" class="wf" '
        f'role="img" aria-label="{label}"><style>{style}</style>{"".join(lines)}</svg>\n'
    )
