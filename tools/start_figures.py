"""What comes before the steps that are measured, as tables: the start of a run, and the search for its micro-batch."""

from datetime import datetime
from pathlib import Path

from record_figures import NOTHING, by_layout, engine_groups, groups_in, rate, steps

from tprimat import units
from tprimat.records.schema import RunRecord
from tprimat.report.tables import table, with_interval

STAGES = {
    "rank_started": "ranks run",
    "imported": "libraries imported",
    "process_group": "ranks know each other",
    "model_built": "model built",
    "training": "first step begins",
}


def first_steps(results: Path) -> str:
    """From the start of the run to the end of its first step, and that step's share."""
    rows = [
        [f"`{name}`", units.seconds(seconds), units.seconds(first.step_seconds), graphs(group.run)]
        for name, group in by_layout(engine_groups(results)).items()
        if (first := group.runs[0].result.steps[0]) and (seconds := first.ended_at_seconds) is not None
    ]
    return (
        table(("layout", "to the end of the first step", "the first step alone", "graphs compiled / from cache"), rows)
        if rows
        else NOTHING
    )


def graphs(run: RunRecord) -> str:
    """How warm the compile cache was."""
    seen = run.evidence
    if seen is None or seen.graphs_compiled is None:
        return units.ABSENT
    return f"{seen.graphs_compiled} / {seen.graphs_from_cache}"


def start_up(results: Path) -> str:
    """Seconds from the start of one and the same run to each stage of its start, cold and warm, by versions in their order."""
    found = [(folder.name, group) for folder in (results / "start-up").glob("*/") for group in groups_in(folder, [])]
    rows = []
    for name, group in sorted(found, key=lambda pair: pair[1].run.started_at or ""):
        for result in (item.result for item in group.runs):
            stages = [units.seconds(result.run.start_up[stage]) for stage in STAGES]
            first, last = (result.steps[place].ended_at_seconds or 0 for place in (0, -1))
            after = units.seconds(lasted(result.run) - last)
            rows.append([name, *stages, units.seconds(first), graphs(result.run), after])
    header = (
        "compile cache",
        *STAGES.values(),
        "first step ends",
        "graphs compiled / from cache",
        "end of the last step to the run's",
    )
    return table(header, rows) + before_fewer_imports(results) if rows else NOTHING


def lasted(run: RunRecord) -> float:
    """Seconds from a run's start to its end."""
    start, end = (datetime.fromisoformat(moment or "") for moment in (run.started_at, run.ended_at))
    return (end - start).total_seconds()


def before_fewer_imports(results: Path) -> str:
    """How long the stage of the libraries took in runs that imported all of torchmetrics."""
    starts = [item.result.run.start_up for group in groups_in(results / "switches" / "one", []) for item in group.runs]
    took = sorted(start["imported"] - start["rank_started"] for start in starts if "imported" in start)
    if not took:
        return ""
    span = f"{units.seconds(took[0])} to {units.seconds(took[-1])}"
    return f"\n\nIn the {len(took)} runs of `switches/one`, before a rank imported less, the libraries took {span}."


def micro_batch_search(results: Path) -> str:
    """What was tried before the largest micro-batch was found, and what the run with it then took."""
    rows = []
    for group in groups_in(results / "auto", []):
        run, metrics = group.run, group.runs[0].metrics
        search = run.micro_batch_search
        if search is None or metrics is None:
            continue
        tried = {trial.micro_batch_sequences: trial.peak_bytes for trial in search.trials}
        larger, would_take = min(search.predicted_bytes.items(), default=(None, None))
        rows.append(
            [
                f"{run.model}, {run.machine.gpus} x {run.machine.accelerator}, s{run.sequence_tokens}, "
                f"GBS{run.global_batch_sequences}, {run.engine_options.get('optimizer_states')} states",
                "; ".join(f"{size}: {units.gibibytes(taken)}" for size, taken in tried.items()),
                f"{larger}: {units.gibibytes(would_take)}" if larger else units.ABSENT,
                units.gibibytes(min(trial.limit_bytes for trial in search.trials if trial.limit_bytes)),
                str(run.micro_batch_sequences),
                units.gibibytes(metrics.peak_memory_bytes),
                with_interval(rate(group), units.count),
                steps(group),
            ]
        )
    header = ("run", "tried: takes", "the next would take", "may fill", "chosen", "the run's peak", "tokens/s/GPU", "n")
    return table(header, rows, left=3) if rows else NOTHING
