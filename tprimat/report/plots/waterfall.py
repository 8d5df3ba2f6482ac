"""Draw a waterfall as SVG, which follows the reader's light or dark colours: a file of its own, or part of the page."""

from html import escape
from pathlib import Path

from tprimat.core import units
from tprimat.report.explain import Explanation, Unit, bars, named, speed_of, unit_of
from tprimat.report.names import KNOWN_BY

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
    scale = ROOM / max(max(span) for span in spans)
    lines = [f'<text x="{LABELS}" y="22" class="wf-head">{escape(who)}</text>']
    speed = escape(speed_of(explanation.parts)) + (" (in ms)" if unit == "ms" else "")
    lines.append(f'<text x="{LABELS}" y="41" class="wf-soft">{speed}</text>')
    for row, (bar, (start, end)) in enumerate(zip(rows, spans, strict=True)):
        top = 54 + row * ROW
        left, width = BARS + min(start, end) * scale, max(1.5, abs(end - start) * scale)
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
