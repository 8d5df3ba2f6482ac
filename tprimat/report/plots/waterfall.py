"""Draw a waterfall as SVG, which follows the reader's light or dark colours: a file of its own, or part of the page."""

from html import escape

from tprimat.analyze.waterfall import Known
from tprimat.core import units
from tprimat.report.explain import Explanation, Unit, amount, signed, title_of, unit_of
from tprimat.report.names import KNOWN_BY, LOSS_NAMES

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
    parts, unit = found.parts, unit_of(found.parts, asked)
    sign = 1 if unit == "ms" else -1
    last = parts.step_seconds * 1e3 if unit == "ms" else (parts.flops or 0.0) / 1e12
    at = (parts.at_peak_seconds * 1e3 if unit == "ms" else (parts.peak_flops or 0.0) / 1e12) if parts.peak_flops else 0.0
    bars = [("at the dense peak", 0.0, at, "base", f"{at:,.0f}", "data sheet")] if at else []
    for loss in parts.losses:
        size = sign * amount(parts, loss, unit)
        bars.append((LOSS_NAMES[loss.name], at, at + size, loss.known_by, signed(size, 0), KNOWN_BY[loss.known_by]))
        at += size
    bars.append(("measured", 0.0, last, "run", f"{last:,.0f}", KNOWN_BY["run"]))
    scale = ROOM / max(max(start, end) for _, start, end, *_ in bars)
    who, _, how = title_of(found).rpartition(": ")
    lines = [f'<text x="{LABELS}" y="22" class="wf-head">{escape(who)}</text>']
    lines.append(f'<text x="{LABELS}" y="41" class="wf-soft">{escape(how)}{" (in ms)" if unit == "ms" else ""}</text>')
    for row, (name, start, end, kind, value, note) in enumerate(bars):
        top = 54 + row * ROW
        left, width = BARS + min(start, end) * scale, max(1.5, abs(end - start) * scale)
        lines += [
            f'<text x="{LABELS}" y="{top + 14}">{escape(name)}</text>',
            f'<rect x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{ROW - 7}" rx="2" class="wf-{kind}"/>',
            f'<text x="{VALUES}" y="{top + 14}" text-anchor="end">{escape(value)}</text>',
            f'<text x="{NOTES}" y="{top + 14}" class="wf-soft">{escape(note)}</text>',
        ]
    height = 62 + len(bars) * ROW
    label = escape(f"Waterfall of {who}: {units.seconds(parts.step_seconds)} a step, by part.")
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
