"""Draw a waterfall as SVG, which follows the reader's light or dark colours: a file of its own, or part of the page."""

from html import escape

from tprimat.analyze.waterfall import Known
from tprimat.core import units
from tprimat.report.explain import Explanation, Unit, bars, named, speed_of, unit_of
from tprimat.report.names import KNOWN_BY

WIDTH, ROW = 800, 23
LABELS, BARS, VALUES, NOTES = 12, 205, 618, 630
"""Where labels, bars and notes begin, and where numbers end, in pixels."""
ROOM = 355
"""Pixels of the longest bar."""
COLOURS: dict[Known, tuple[str, str]] = {
    "run": ("#0072b2", "#56b4e9"),
    "machine": ("#00845f", "#2fc39a"),
    "predicted": ("#c77700", "#e69f00"),
    "rest": ("#8b95a1", "#a3adb8"),
}
"""How a part is known -> its colour on white and on black: those of the other pictures."""
INK, SOFT, BASE = ("#16202c", "#e6e9ed"), ("#566474", "#9aa7b5"), ("#c9d0d8", "#48525e")


def svg(found: Explanation, asked: Unit = "tflops") -> str:
    """Return the picture; readable at 800 pixels."""
    unit, who = unit_of(found.parts, asked), named(found)
    rows, at, spans = bars(found.parts, unit), 0.0, []
    for bar in rows:
        start = 0.0 if bar.share is None else at
        at = start + bar.amount
        spans.append((start, at))
    scale = ROOM / max(max(span) for span in spans)
    lines = [f'<text x="{LABELS}" y="22" class="wf-head">{escape(who)}</text>']
    speed = escape(speed_of(found.parts)) + (" (in ms)" if unit == "ms" else "")
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
    label = escape(f"Waterfall of {who}: {units.seconds(found.parts.step_seconds)} a step, by part.")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" class="wf" '
        f'role="img" aria-label="{label}"><style>{_style()}</style>{"".join(lines)}</svg>\n'
    )


def _style() -> str:
    """Return the rules of both colour schemes."""
    light, dark = (
        f".wf text{{fill:{INK[one]};font:13px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}}"
        f".wf .wf-soft{{fill:{SOFT[one]};font-size:12px}}.wf .wf-head{{font-weight:600;font-size:15px}}"
        f".wf-base{{fill:{BASE[one]}}}" + "".join(f".wf-{kind}{{fill:{colours[one]}}}" for kind, colours in COLOURS.items())
        for one in (0, 1)
    )
    return f".wf{{max-width:100%;height:auto}}{light}@media (prefers-color-scheme:dark){{{dark}}}"
