"""One self-contained page on any number of runs: it opens offline, asks nothing of any server, and prints."""

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from string import Template
from typing import Any

from tprimat import units
from tprimat.analyze.groups import Group, Measured
from tprimat.analyze.ranking import Ranking
from tprimat.errors import LaunchError, RecordError
from tprimat.report.comparison import Comparison
from tprimat.report.html import sections, summary
from tprimat.report.html.data import page_data
from tprimat.report.html.ranking import ranking
from tprimat.report.plots.style import looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a page tells."""

    races: tuple[Ranking, ...]
    """Together they hold every group of runs that count, each once."""
    not_counted: tuple[Measured, ...] = ()
    problems: tuple[RecordError, ...] = ()
    """Files that could not be read."""

    @property
    def groups(self) -> list[Group]:
        """As the page lists them: race by race, the fastest first."""
        return [group for race in self.races for group in race.groups]

    @property
    def runs(self) -> list[Measured]:
        """Counted ones first."""
        return [*(item for group in self.groups for item in group.runs), *self.not_counted]


def html_report(report: Report) -> str:
    """The page. The same results give the same bytes: it holds no date of its own.

    Raises:
        LaunchError: plotly, which draws the curves, is not installed.
    """
    groups = report.groups
    comparison = Comparison(
        groups=tuple(groups),
        verdicts=tuple(found for race in report.races for found in race.against_best if found is not None),
        not_counted=report.not_counted,
    )
    appearance = looks(len(groups))
    return Template(_asset("page.html")).substitute(
        title=escape(_title(groups)),
        facts=escape(_facts(report)),
        style=_asset("page.css"),
        summary=summary.summary(report.races, comparison),
        ranking=ranking(report.races, comparison, appearance),
        panels=sections.panels(groups),
        difference=sections.difference_form(report.runs),
        evidence=sections.evidence(comparison, report.runs),
        failed=sections.failed(report.not_counted, report.problems),
        commands=sections.commands(groups, report.not_counted),
        data=packed(json.dumps(page_data(groups, report.runs, appearance), separators=(",", ":"), allow_nan=False).encode()),
        plotly=_plotly(),
        script="\n".join(_asset(name) for name in ("pack.js", "table.js", "plots.js", "difference.js")),
    )


def packed(content: bytes) -> str:
    """Gzip in base64, for a script element that the page unpacks when it needs it."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


@cache
def _asset(name: str) -> str:
    return resources.files("tprimat.report.html").joinpath("assets").joinpath(name).read_text(encoding="utf8")


@cache
def _plotly() -> str:
    """The library's own bundle as its Python package ships it, packed to two fifths."""
    try:
        return packed(resources.files("plotly").joinpath("package_data").joinpath("plotly.min.js").read_bytes())
    except (ModuleNotFoundError, FileNotFoundError) as error:
        what = "The page needs plotly, which draws its curves."
        raise LaunchError(what, why=str(error), fix="pip install -r requirements.txt") from error


def _title(groups: Sequence[Group]) -> str:
    models = list(dict.fromkeys(group.run.model for group in groups))
    named = ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")
    return f"Training throughput: {named}" if models else "Training throughput"


def _facts(report: Report) -> str:
    groups, counted = report.groups, [item for group in report.groups for item in group.runs]
    days = sorted({item.result.run.started_at[:10] for item in report.runs if item.result.run.started_at})
    parts: list[Any] = [
        _plural(len(groups), "configuration"),
        _plural(len(counted), "run") + " counted",
        _plural(sum(item.metrics.window.steps for item in counted if item.metrics), "steady step"),
    ]
    if report.not_counted:
        parts.append(f"{len(report.not_counted)} not counted")
    if days:
        parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return " · ".join(parts)


def _plural(number: int, what: str) -> str:
    return f"{units.count(number)} {what}{'' if number == 1 else 's'}"
