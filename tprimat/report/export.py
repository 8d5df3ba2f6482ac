"""One row per run, flat, for notebooks: the columns, and the rows as CSV.

Units are SI: seconds, bytes, watts, FLOP/s, fractions 0..1. None is what was not recorded or measured; CSV leaves the cell empty.
"""

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence

from tprimat.analyze.groups import Measured
from tprimat.analyze.metrics import watts_per_gpu
from tprimat.analyze.traits import processors, tokens_per_step
from tprimat.core.flops import parameters
from tprimat.core.rows import DATA, document, placed
from tprimat.report.words import finding_words, not_counted_words, without_mfu

Value = bool | int | float | str | None
Row = dict[str, Value]

COLUMNS = tuple(document(DATA / "documents.yaml")["export"])
"""Of every run. Behind them follow version_*, option_* and variable_*, where a run has them."""
COMPUTED: Mapping[str, Callable[[Measured], Value]] = {
    "path": lambda item: str(item.result.path),
    "not_counted_because": lambda item: not_counted_words(item) or None,
    "parameters": lambda item: parameters(shape).total if (shape := item.result.run.ran.shape) else None,
    "processor": lambda item: processors(item.result.run),
    "tokens_per_step": lambda item: tokens_per_step(item.result.run),
    "mfu_absent_because": lambda item: without_mfu(item.metrics) or None,
    "watts_per_gpu": lambda item: watts_per_gpu(item.result.run, item.metrics),
    "warnings": lambda item: ("; ".join(map(finding_words, item.metrics.warnings)) or None) if item.metrics else None,
}


def rows_of(runs: Sequence[Measured]) -> list[Row]:
    """Return one row per run, all with the same columns in the same order."""
    rows = [
        placed("documents.export", run=item.result.run, metrics=item.metrics, item=item)
        | {name: pick(item) for name, pick in COMPUTED.items()}
        | _software_and_options(item)
        for item in runs
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    ordered = [*COLUMNS, *sorted(names.keys() - {*COLUMNS})]
    return [{name: row.get(name) for name in ordered} for row in rows]


def _software_and_options(item: Measured) -> Row:
    """Return each package's version as version_NAME, the engine's switches as option_NAME, and variables as variable_NAME."""
    run = item.result.run
    versions = {f"version_{_identifier(name)}": version for name, version in run.software.items()}
    versions |= {f"variable_{name}": value for name, value in (run.environment or {}).items()}
    options = {f"option_{_identifier(name)}": str(value) for name, value in run.engine_options.items() if value is not None}
    return {**versions, **options}


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def comma_separated(rows: Sequence[Row]) -> str:
    """Format the rows as CSV with a header. Text that a spreadsheet would run as a formula begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow([re.sub(r"^([=+@\t\r-])", r"'\1", value) if isinstance(value, str) else value for value in row.values()])
    return out.getvalue()
