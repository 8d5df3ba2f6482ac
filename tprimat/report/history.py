"""A history as text, and as one HTML page with a curve for each configuration."""

from collections.abc import Sequence
from html import escape

from tprimat.analyze.history import ALWAYS_SHOWN, JOINT, LEAST_RUNS, Change, Course, Entry
from tprimat.core import units
from tprimat.report.screen import PLAIN, Screen
from tprimat.report.tables import plural

MOST_FACTS = 12
"""Of one change; the others are counted."""
WIDTH, HEIGHT, MARGIN, LEFT = 860, 150, 30, 64
LEAST_ROOM = 0.02
"""Above and below the rates, of the highest: runs that differ by noise alone do not fill the height."""


def text(courses: Sequence[Course], screen: Screen = PLAIN, not_counted: Sequence[Entry] = ()) -> str:
    """Return each configuration with its newest rate and its changes, each with what changed then; last what does not count."""
    blocks = [_course(course, screen) for course in courses] or ["No run counts."]
    lost = "\n".join(screen.prose(line, 2, "refused") for line in lost_lines(not_counted))
    return "\n\n".join([*blocks, lost] if lost else blocks)


MOST_LOST = 20
"""Runs that do not count, by name; the others are counted."""


def lost_lines(entries: Sequence[Entry]) -> list[str]:
    """Return a line for each run that does not count, with the reason."""
    lines = [f"Not counted: {entry.run_id}: {entry.not_counted}" for entry in entries[:MOST_LOST]]
    return lines + ([f"Not counted: {plural(len(entries) - MOST_LOST, 'more run')}"] if len(entries) > MOST_LOST else [])


def unchanged(runs: Sequence[Entry]) -> str:
    """Say that no change is shown, or that there are too few runs to show one."""
    fewest = 2 * LEAST_RUNS
    return "no change of rate is shown" if len(runs) >= fewest else f"fewer than {fewest} runs show no change of rate"


def _course(course: Course, screen: Screen) -> str:
    runs = course.entries
    first, last = runs[0].started_at[:10], runs[-1].started_at[:10]
    when = (first if first == last else f"{first} to {last}") or "no date"
    lines = [screen.prose(course.label, 2, "heading")]
    lines.append(f"  {plural(len(runs), 'run')}, {when}; the newest {units.significant(runs[-1].rate or 0)} {course.unit}")
    if not course.changes:
        lines.append(f"  {unchanged(runs)}")
    for change in course.changes:
        words = f"  {sentence(change, runs[change.place])}"
        lines.append(screen.prose(words, 4, "refused" if change.ratio < 1 else "winner"))
        lines += [screen.prose(f"    {line}", 6) for line in what_changed(change)]
    return "\n".join(lines)


def sentence(change: Change, after: Entry) -> str:
    """Return by how much the rate changed, and since when."""
    moment = after.started_at[:16].replace("T", " ")
    before, since = change.runs
    behind = f"medians of {plural(before, 'run')} before and {since} since"
    return f"{units.signed_percent(change.ratio - 1)} since {moment} (run {after.run_id}; {behind})"


def what_changed(change: Change) -> list[str]:
    """Return a line for each fact that changed between the runs around a change."""
    if not change.facts:
        return ["nothing that is recorded changed: clocks, heat, other users and the network are not"]
    lines = [f"{name}: {before} -> {after}" for name, before, after in change.facts[:MOST_FACTS]]
    return lines + ([f"and {len(change.facts) - MOST_FACTS} more"] if len(change.facts) > MOST_FACTS else [])


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; color: #1b1f24 }
h2 { font-size: 1em; margin: 2.2em 0 0 } p { margin: .3em 0; color: #57606a } li { margin: .2em 0 }
svg { width: 100%; height: auto } .line { fill: none; stroke: #8c959f } .run { fill: #0969da } .change { stroke: #cf222e }
.level { stroke: #d0d7de; stroke-dasharray: 3 3 } text { font-size: 11px; fill: #57606a }
table { border-collapse: collapse; font-size: .92em }
td, th { text-align: right; padding: .25em .8em; border-bottom: 1px solid #d0d7de }
td + td { white-space: nowrap }
td:first-child, th:first-child { text-align: left; padding-left: 0 } .slower { color: #cf222e } .faster { color: #1a7f37 }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 } .run { fill: #4493f8 } }
"""


def page(courses: Sequence[Course], not_counted: Sequence[Entry] = ()) -> str:
    """Return one page that opens offline: a curve for each configuration with its changes; a table of those with few runs."""
    curves = [course for course in courses if len(course.entries) >= 2 * LEAST_RUNS]
    few = [course for course in courses if len(course.entries) < 2 * LEAST_RUNS]
    body = "\n".join(map(_section, curves)) + (_table(few) if few else "")
    body = body or "<p>No run counts.</p>"
    body += "".join(f"<p>{escape(line)}</p>" for line in lost_lines(not_counted))
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>History</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>History</h1>{body}</body></html>\n"


def _table(courses: Sequence[Course]) -> str:
    """Return configurations with too few runs for a change, a line for each."""
    lines = []
    for course in courses:
        rates = [entry.rate or 0.0 for entry in course.entries]
        spread = "" if len(rates) == 1 else f"{units.significant(min(rates))} to {units.significant(max(rates))}"
        cells = (course.label, course.entries[-1].started_at[:10], len(rates), units.significant(rates[-1]), spread)
        lines.append("<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in cells))
    unit = " or ".join(dict.fromkeys(course.unit for course in courses))
    head = "".join(f"<th>{name}" for name in ("configuration", "newest run", "runs", f"{unit}, newest", "all"))
    return (
        f"<h2>Fewer than {2 * LEAST_RUNS} runs</h2><p>Too few to tell whether the rate changed.</p>"
        f"<table><tr>{head}{''.join(lines)}</table>"
    )


def _section(course: Course) -> str:
    items = []
    for change in course.changes:
        facts = "".join(f"<li>{escape(line)}" for line in what_changed(change))
        kind = "slower" if change.ratio < 1 else "faster"
        items.append(f"<li><b class={kind}>{escape(sentence(change, course.entries[change.place]))}</b><ul>{facts}</ul>")
    told = f"<ul>{''.join(items)}</ul>" if items else f"<p>{unchanged(course.entries).capitalize()}.</p>"
    words = course.label.split(JOINT)
    head, own = (escape(JOINT.join(part)) for part in (words[:ALWAYS_SHOWN], words[ALWAYS_SHOWN:]))
    return f"<h2>{head}</h2>{own and f'<p>{own}</p>'}{_curve(course)}{told}"


def _curve(course: Course) -> str:
    """Return the rates as SVG: runs in order, since what happens between them takes no place.

    Lines mark the lowest and the highest rate, and the axis goes little beyond them: a change of 3 % must be seen.
    """
    rates = [entry.rate or 0.0 for entry in course.entries]
    low, high = min(rates), max(rates)
    room = max(0.1 * (high - low), LEAST_ROOM * high)
    bottom, top, right = HEIGHT - MARGIN, MARGIN / 2, WIDTH - MARGIN / 2

    def height(rate: float) -> float:
        return bottom - (bottom - top) * (rate - low + room) / (high - low + 2 * room)

    points = [(LEFT + (right - LEFT) * place / (len(rates) - 1), height(rate)) for place, rate in enumerate(rates)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f"<circle class=run cx={x:.1f} cy={y:.1f} r=3><title>{escape(_about(entry, course.unit))}</title></circle>"
        for (x, y), entry in zip(points, course.entries, strict=True)
    )
    marks = "".join(
        f"<line class=change x1={x:.1f} x2={x:.1f} y1={top} y2={bottom} />"
        for change in course.changes
        for x in [(points[change.place - 1][0] + points[change.place][0]) / 2]
    )
    levels = "".join(
        f"<line class=level x1={LEFT} x2={right} y1={height(rate):.1f} y2={height(rate):.1f} />"
        f"<text x={LEFT - 8} y={height(rate) + 4:.1f} text-anchor=end>{units.significant(rate)}</text>"
        for rate in sorted({low, high})
    )
    below = bottom + 18
    words = (
        f"<text x=0 y=12>{course.unit}</text><text x={LEFT} y={below}>{course.entries[0].started_at[:10]}</text>"
        f"<text x={right} y={below} text-anchor=end>{course.entries[-1].started_at[:10]}</text>"
    )
    drawn = f"{levels}<polyline class=line points='{line}' />{marks}{dots}{words}"
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>{drawn}</svg>"


def _about(entry: Entry, unit: str) -> str:
    return f"{entry.run_id}: {units.significant(entry.rate or 0)} {unit}"
