"""The page's other sections: panels, difference of two runs, evidence, failures, commands."""

import shlex
from collections.abc import Sequence
from html import escape

from tprimat import units
from tprimat.analyze.groups import Group, Measured, kind_of
from tprimat.errors import RecordError
from tprimat.records.schema import Evidence, RunRecord
from tprimat.report.comparison import Comparison, notes, remarks, run_name
from tprimat.report.plots.comparison import CURVES, memory_panel, throughput_panel

MOST_PLACES = 8
"""Runs that a warning names in full sight."""


def panels(groups: Sequence[Group]) -> str:
    """An empty figure for each panel; the script draws it when it comes into view."""
    if not groups:
        return '<p class="note">No run counts.</p>'
    bars = [panel(groups).title for panel in (throughput_panel, memory_panel)]
    made = [_figure("bars", index, title) for index, title in enumerate(bars)]
    made += [_figure("curves", index, curve.title) for index, curve in enumerate(CURVES)]
    return "".join(made)


def _figure(kind: str, index: int, title: str) -> str:
    name = escape(title)
    spoken = f"{name}. The ranking holds the figures."
    return (
        f'<figure class="panel"><figcaption>{name}</figcaption>'
        f'<div class="plot" data-kind="{kind}" data-index="{index}" role="img" aria-label="{spoken}">'
        f'<span class="waiting">drawn when in view</span></div></figure>'
    )


def difference_form(runs: Sequence[Measured]) -> str:
    """Two lists to choose from; the script fills the table."""
    if len(runs) < 2:
        return '<p class="note">There is only one run.</p>'
    kinds = [kind_of(item.result, None) for item in runs]
    second = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), 1)
    lists = [
        f'<label>{name}<select id="{name}-run">'
        + "".join(
            f'<option value="{i}"{" selected" * (i == chosen)}>{escape(run_name(item))}</option>' for i, item in enumerate(runs)
        )
        + "</select></label>"
        for name, chosen in (("first", 0), ("second", second))
    ]
    same = '<label class="check"><input id="same" type="checkbox">also what is alike</label>'
    return f'<form class="controls" id="pick">{"".join(lists)}{same}</form><div id="difference" aria-live="polite"></div>'


def evidence(comparison: Comparison, runs: Sequence[Measured]) -> str:
    """Warnings, each with the runs that it is true of, then what every run proves about itself."""
    warnings = [f"<li>{escape(what)}{_places(places)}</li>" for what, places in _all_notes(comparison).items()]
    spread = [f"<li>{escape(line)}</li>" for line in remarks(comparison) if line.startswith("Runs of ")]
    listed = f'<ul class="warnings">{"".join(warnings)}</ul>' if warnings else "<p>No warnings.</p>"
    listed += f"<ul>{''.join(spread)}</ul>" if spread else ""
    rows = "".join(
        f"<tr><th scope=row>{escape(run_name(item))}</th><td>{_said(item.result.run)}</td>"
        f"<td>{escape(item.metrics.window.rule) if item.metrics else units.ABSENT}</td></tr>"
        for item in runs
    )
    head = "<tr><th scope=col>run</th><th scope=col>what it says it ran</th><th scope=col>steady steps</th></tr>"
    table = f'<div class="scroll"><table class="plain stack"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    return f"{listed}<details><summary>Evidence of every run ({len(runs)})</summary>{table}</details>"


def _all_notes(comparison: Comparison) -> dict[str, list[str]]:
    """Those of the table, then runs whose evidence contradicts what was asked."""
    found = {what.removeprefix("Note, "): places for what, places in notes(comparison).items()}
    for item in comparison.not_counted:
        for mismatch in item.result.run.mismatches:
            found.setdefault(f"what ran is not what was asked: {mismatch}", []).append(run_name(item))
        for warning in item.metrics.warnings if item.metrics else ():
            if not warning.startswith(("not counted", "the run did not complete")):
                found.setdefault(warning, []).append(run_name(item))
    return found


def _places(places: Sequence[str]) -> str:
    shown = ", ".join(places[:MOST_PLACES])
    if len(places) <= MOST_PLACES:
        return f' <span class="where">{escape(shown)}</span>'
    rest = escape(", ".join(places[MOST_PLACES:]))
    return (
        f' <span class="where">{escape(shown)}</span><details><summary>{len(places) - MOST_PLACES} more</summary>{rest}</details>'
    )


def _said(run: RunRecord) -> str:
    if run.evidence is None:
        return "nothing"
    source = "the running framework" if run.evidence.source == "running_framework" else "its log"
    fields = [f"{name} {text}" for name, text in _evidence_fields(run.evidence)]
    said = "; ".join([*fields, *run.evidence.notes]) or "nothing more"
    return f"<b>{source}:</b> {escape(said)}"


def _evidence_fields(found: Evidence) -> list[tuple[str, str]]:
    """What is known, in the words of the record."""
    pairs = [
        (name.replace("_", " "), getattr(found, name))
        for name in Evidence.__dataclass_fields__
        if name not in {"source", "notes", "__pydantic_config__"}
    ]
    return [(name, units.count(value) if type(value) is int else str(value)) for name, value in pairs if value is not None]


def failed(not_counted: Sequence[Measured], problems: Sequence[RecordError]) -> str:
    """Runs that do not count, with cause and hint, and files that could not be read."""
    if not not_counted and not problems:
        return "<p>Every run counts, every file could be read.</p>"
    rows = "".join(_failure(item) for item in not_counted)
    head = "<tr>" + "".join(f"<th scope=col>{name}</th>" for name in ("run", "configuration", "outcome", "cause")) + "</tr>"
    table = (
        f'<div class="scroll"><table class="plain stack"><thead>{head}</thead><tbody>{rows}</tbody></table></div>' if rows else ""
    )
    files = "".join(f"<li><pre>{escape(str(problem))}</pre></li>" for problem in problems)
    return table + (f"<h3>Files that could not be read ({len(problems)})</h3><ul>{files}</ul>" if files else "")


def _failure(item: Measured) -> str:
    run = item.result.run
    outcome = run.outcome.replace("_", " ") + ("" if run.exit_code is None else f", exit {run.exit_code}")
    cause = item.not_counted if run.cause is None or run.outcome == "completed" else run.cause
    hint = f'<br><span class="where">try: {escape(run.hint)}</span>' if run.hint else ""
    what = f"{run.model}, {run.strategy or 'strategy unknown'}, {run.engine}"
    return (
        f"<tr><th scope=row>{escape(run_name(item))}</th><td>{escape(what)}</td>"
        f"<td>{escape(outcome)}</td><td>{escape(cause or units.ABSENT)}{hint}</td></tr>"
    )


def commands(groups: Sequence[Group], not_counted: Sequence[Measured]) -> str:
    """The command line of every configuration, each said once."""
    named = [(group.label, [item.result.run for item in group.runs]) for group in groups]
    named += [(f"{run_name(item)} (not counted)", [item.result.run]) for item in not_counted]
    blocks, silent = [], []
    for label, runs in named:
        lines = list(dict.fromkeys(shlex.join(run.command) for run in runs if run.command))
        if lines:
            blocks.append(_command(label, lines))
        else:
            silent.append(label)
    unknown = f'<p class="note">Not recorded for: {escape(", ".join(silent))}.</p>' if silent else ""
    return "".join(blocks) + unknown


def _command(label: str, lines: Sequence[str]) -> str:
    text = escape("\n".join(lines))
    button = '<button type="button" class="copy">copy</button>'
    return f'<div class="command"><h3>{escape(label)}</h3><pre tabindex="0"><code>{text}</code></pre>{button}</div>'
