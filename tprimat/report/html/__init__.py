"""Write one self-contained HTML page on any number of runs: it opens offline, contacts no server, and prints."""

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from itertools import cycle

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tprimat.analyze.compare import Ranking
from tprimat.analyze.groups import Measured
from tprimat.analyze.traits import few, model_and_shape
from tprimat.core import units
from tprimat.core.errors import LaunchError, RecordError
from tprimat.records.sharing import LEFT_HERE
from tprimat.report.explain import Explanation, advised, svg
from tprimat.report.html import sections
from tprimat.report.html.sections import page_data, short_names, shown_panels
from tprimat.report.names import ranked_workloads
from tprimat.report.plots import MOST_SERIES, looks
from tprimat.report.plots.comparison import colors
from tprimat.report.words import caveats, rule_words, run_name, subtitle

SCRIPTS = ("gunzip.js", "pack.js", "table.js", "plots.js")


def html_report(
    rankings: Sequence[Ranking],
    explained: Sequence[Explanation],
    not_counted: Sequence[Measured],
    problems: Sequence[RecordError],
) -> str:
    """Return the page. The same results give the same bytes, since it holds no date but theirs.

    `explained`: a run of the fastest configuration of each workload. Raises LaunchError: plotly, which draws curves, is missing.
    """
    groups, works = [group for ranking in rankings for group in ranking.groups], ranked_workloads(rankings)
    runs = [*(item for group in groups for item in group.runs), *not_counted]
    shown, rest = colors(works), cycle(looks(4 * MOST_SERIES)[MOST_SERIES:])  # the fastest look as in pictures
    appearance = [shown.get(one.name) or next(rest) for work in works for one in work.configurations]
    names = short_names(runs)
    models = list(dict.fromkeys(model_and_shape(group.run) for group in groups))
    cards, remarks = sections.cards(works)
    bars, curves = shown_panels(groups)
    records = [item.result.run for item in runs]
    data = json.dumps(page_data(works, runs, appearance), separators=(",", ":"), allow_nan=False)
    return (
        _templates()
        .get_template("page.html")
        .render(
            groups=groups,
            runs=runs,
            problems=problems,
            name_of=lambda item: names[run_name(item)],
            title="Training throughput" + (f": {few(models, 3)}" if models else ""),
            facts=subtitle(works) + (f" · {len(not_counted)} not counted" if not_counted else ""),
            hardware=sections.hardware(records),
            software=sections.software(records),
            cards=cards,
            remarks=remarks,
            waterfalls=[(Markup(svg(one)), advised(one)) for one in explained],
            ranking=sections.ranking_table(works, appearance),
            bar_titles=[panel.title for panel in bars],
            curve_titles=[curve.title for curve in curves],
            warnings=sections.warnings(groups, not_counted, names),
            caveats=caveats(rankings),
            failures=sections.failures(not_counted, names),
            commands=sections.commands(works, not_counted, names),
            style=_asset("page.css"),
            script=Markup("\n").join(_asset(name) for name in SCRIPTS),
            data=packed(data.encode()),
            plotly=_plotly(),
        )
    )


@cache
def _templates() -> Environment:
    """Return the page's templates, which escape every value that is not marked as HTML."""
    environment = Environment(
        loader=PackageLoader("tprimat.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(evidence_fields=sections.evidence_fields, rule_words=rule_words)
    environment.globals.update(ABSENT=units.ABSENT)
    environment.tests.update(incomplete=lambda command: any(mark in command for mark in LEFT_HERE))
    return environment


def packed(content: bytes) -> str:
    """Compress content with gzip into base64, for a script element that the page unpacks on demand."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


@cache
def _asset(name: str) -> Markup:
    """Return a style sheet or script of our own, which must not be escaped."""
    return Markup(resources.files("tprimat.report.html").joinpath("assets").joinpath(name).read_text(encoding="utf8"))


@cache
def _plotly() -> str:
    """Return the bundle that plotly's Python package ships, compressed to two fifths."""
    try:
        return packed(resources.files("plotly").joinpath("package_data").joinpath("plotly.min.js").read_bytes())
    except (ModuleNotFoundError, FileNotFoundError) as error:
        what = "The page needs plotly, which draws its curves."
        raise LaunchError(what, why=str(error), fix="pip install -r requirements.txt") from error
