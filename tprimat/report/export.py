"""One row per run, flat, for notebooks: the columns, and the rows as CSV.

Units are SI: seconds, bytes, watts, FLOP/s, fractions 0..1. None is what was not recorded or measured; CSV leaves the cell empty.
"""

import csv
import io
import re
from collections.abc import Callable, Sequence

from tprimat.analyze.groups import Measured
from tprimat.analyze.metrics import watts_per_gpu
from tprimat.analyze.traits import processors, tokens_per_step
from tprimat.core.flops import parameters
from tprimat.report.tables import csv_cell
from tprimat.report.words import finding_words, not_counted_words, without_mfu

Value = bool | int | float | str | None
Row = dict[str, Value]
Pick = Callable[[Measured], Value]


def _at(path: str) -> Pick:
    """Return a function that follows attributes; None where one of them is None."""

    def pick(item: Measured) -> Value:
        value: object = item
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        return value  # type: ignore[return-value]  # the columns end at values

    return pick


def _of(place: str, names: str) -> dict[str, Pick]:
    """Return columns of a part of a run; name=path where the field has another name."""
    pairs = (word.partition("=") for word in names.split())
    return {name: _at(f"{place}.{path or name}") for name, _, path in pairs}


def _interval(name: str) -> dict[str, Pick]:
    """Return three columns of an estimate: its value, and the ends of its 95 % interval over the steps of the run."""
    return {f"{name}{end}": _at(f"metrics.{name}.{part}") for end, part in (("", "value"), ("_low", "low"), ("_high", "high"))}


COLUMNS: dict[str, Pick] = {
    **_of("result.run", "run_id"),
    "path": lambda item: str(item.result.path),
    **_of("result.run", "started_at ended_at outcome"),
    "counted": lambda item: item.counts,
    "not_counted_because": lambda item: not_counted_words(item) or None,
    **_of("result.run", "cause model size architecture=ran.shape.name"),
    "parameters": lambda item: parameters(shape).total if (shape := item.result.run.ran.shape) else None,
    **_of("result.run", "strategy"),
    **_of("result.run.ran", "tensor_parallel pipeline_parallel data_parallel context_parallel virtual_pipeline expert_parallel"),
    **_of("result.run.ran", "sequence_parallel"),
    **_of("result.run", "engine"),
    **_of("result.run.machine", "platform accelerator gpus nodes accelerator_memory_bytes=memory_bytes power_limit_watts driver"),
    "processor": lambda item: processors(item.result.run),
    **_of("result.run.ran", "micro_batch_sequences global_batch_sequences accumulation_steps sequence_tokens"),
    "tokens_per_step": lambda item: tokens_per_step(item.result.run),
    **_of("result.run.ran", "matmul_dtype recompute=recompute_words routing attention"),
    **_of("result.run", "transformer_engine=evidence.transformer_engine data=ran.data seed clock"),
    **_of("metrics", "n=window.steps first_step=window.first_step last_step=window.last_step tokens_per_second"),
    **_interval("tokens_per_second_per_gpu"),
    **_interval("model_flops_per_second_per_gpu"),
    **_of("metrics", "flops_convention"),
    **_interval("mfu"),
    "mfu_absent_because": lambda item: without_mfu(item.metrics) or None,
    **_interval("step_seconds"),
    **_of("metrics", "mean_step_seconds step_seconds_mad peak_memory_bytes peak_reserved_bytes"),
    **_of("metrics", "predicted_memory_error predicted_step_error final_loss joules_per_token"),
    "watts_per_gpu": lambda item: watts_per_gpu(item.result.run, item.metrics),
    **_of("metrics", "gpu_busy cost_per_million_tokens expert_load rank_load dropped"),
    "warnings": lambda item: ("; ".join(map(finding_words, item.metrics.warnings)) or None) if item.metrics else None,
}
"""Of every run, explained in docs/results.md. Behind them follow version_*, option_* and variable_*, where a run has them."""


def rows_of(runs: Sequence[Measured]) -> list[Row]:
    """Return one row per run, all with the same columns in the same order."""
    rows = [{name: pick(item) for name, pick in COLUMNS.items()} | _software_and_options(item) for item in runs]
    names = dict.fromkeys(name for row in rows for name in row)
    ordered = [*COLUMNS, *sorted(names.keys() - COLUMNS.keys())]
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
    writer.writerows([csv_cell(value) for value in row.values()] for row in rows)
    return out.getvalue()
