#!/usr/bin/env python3
"""Write the figures of benchmarks/results/performance*.md from the records; with --check, only compare.

python3 tools/performance_page.py
python3 tools/performance_page.py --check

Figures are between <!-- figures NAME --> and <!-- end -->; the prose around them is written by hand.
"""

import json
import re
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]

from energy_figures import energy  # noqa: E402
from graph_figures import cuda_graphs, graph_losses, queues  # noqa: E402
from lead_figures import answer, choices_of_steps, earlier_leads, leads, output_layer  # noqa: E402
from loss_figures import losses  # noqa: E402
from page import page_parser, replace_blocks, update_page  # noqa: E402
from profile_figures import markdown, read_summary  # noqa: E402
from record_figures import (  # noqa: E402
    NOTHING,
    OURS,
    by_layout,
    engine_groups,
    groups_in,
    probes_of,
    rate,
    repeated,
    steps,
    times,
)
from speed_layouts import LAYOUTS, Layout  # noqa: E402
from step_parts import step_breakdown  # noqa: E402
from switch_figures import copy_streams, exchanges, exchanges_as_graphs, forward_sums, no_gain, switches, unswitched  # noqa: E402

from tprimat.analyze.compare import Question, verdict  # noqa: E402
from tprimat.analyze.groups import Group, group_estimate  # noqa: E402
from tprimat.analyze.metrics import MetricOptions  # noqa: E402
from tprimat.core import units  # noqa: E402
from tprimat.records.schema import RunRecord  # noqa: E402
from tprimat.report.explain import text  # noqa: E402
from tprimat.report.tables import table  # noqa: E402
from tprimat.runner.analysis import read_results  # noqa: E402
from tprimat.runner.explain import explained, newest, trace_of_run  # noqa: E402

PAGES = (ROOT / "benchmarks" / "results" / "performance.md", ROOT / "benchmarks" / "results" / "performance-earlier.md")
MEASURED = (
    "layout",
    "tokens/s/GPU",
    "n",
    "TFLOP/s/GPU",
    "MFU",
    "of measured matmul",
    "memory",
    "torchtitan by its own clock, tokens/s/GPU",
    "torchtitan, n",
    "engine / torchtitan, two clocks",
    "reserved, engine / torchtitan",
)


def layouts(results: Path) -> str:
    """List each measured layout with torchtitan's figures and its target."""
    probes = probes_of(results)
    rows = layout_rows(engine_groups(results, probes), groups_in(results / "torchtitan", probes))
    return table((*MEASURED, "target", "of target"), rows) if rows else NOTHING


def layouts_on_two(results: Path) -> str:
    """List the layouts on two GPUs, for which there are no targets."""
    probes, folder = probes_of(results), results / "two-gpus"
    rows = layout_rows(engine_groups(folder, probes), groups_in(folder / "torchtitan", probes))
    return table(MEASURED, [row[: len(MEASURED)] for row in rows]) if rows else NOTHING


def layout_rows(groups: list[Group], peer_groups: list[Group]) -> list[list[str]]:
    """Return a row for each layout that the embedded engine ran."""
    engine, peers = by_layout(groups), by_layout(peer_groups)
    return [layout_row(layout, engine[layout.name], peers.get(layout.name)) for layout in LAYOUTS if layout.name in engine]


def layout_row(layout: Layout, group: Group, peer: Group | None) -> list[str]:
    """Return one row."""
    metrics = [item.metrics for item in group.runs if item.metrics]
    flops = group_estimate(group, lambda run: run.model_flops_per_second_per_gpu)
    mfu = group_estimate(group, lambda run: run.mfu)
    shares = [run.share_of_measured_gemm for run in metrics if run.share_of_measured_gemm]
    ratio = verdict(peer, group, Question(even_if_different=True)).ratio if peer else None
    wanted = layout.target_mfu or layout.target_tokens_per_second_per_gpu
    reached = mfu if layout.target_mfu else rate(group)
    return [
        f"`{layout.name}`",
        repeated(rate(group), units.count, group),
        steps(group),
        f"{flops.value / 1e12:.0f}" if flops else units.ABSENT,
        units.percent(mfu.value) if mfu else units.ABSENT,
        units.percent(sum(shares) / len(shares)) if shares else units.ABSENT,
        units.gibibytes(max(run.peak_memory_bytes or 0 for run in metrics) or None),
        repeated(rate(peer), units.count, peer) if peer else units.ABSENT,
        steps(peer) if peer else units.ABSENT,
        repeated(ratio, times, peer, group) if peer else units.ABSENT,
        f"{reserved(group)} / {reserved(peer)}" if peer else units.ABSENT,
        target(layout),
        units.percent(reached.value / wanted) if reached and wanted else units.ABSENT,
    ]


def reserved(group: Group) -> str:
    """Return the peak that torch's allocator reserved, which is what torchtitan reports."""
    return units.gibibytes(max(item.metrics.peak_reserved_bytes or 0 for item in group.runs if item.metrics) or None)


def target(layout: Layout) -> str:
    """Write the target in its own unit."""
    if layout.target_mfu:
        return f"{units.percent(layout.target_mfu, 0)} MFU"
    return units.count(layout.target_tokens_per_second_per_gpu)


def profiles(results: Path) -> str:
    """Break one step down into kernel classes."""
    summaries = {path.stem: read_summary(path) for path in sorted((results / "profiles").glob("*.json"))}
    return markdown(summaries) if summaries else NOTHING


def parts_of_tp4(results: Path) -> str:
    """Break TP4's step on four H100 down as `tprimat explain` does, by the trace that the run left."""
    place = results.parent / "h100" / "profile-tp4"
    if not place.is_dir():
        return NOTHING
    run = newest(read_results([place], MetricOptions(), {}).measured, place)
    return f"```text\n{text(explained(run, (), trace_of_run(run.result.run, run.result.path)), 'tflops')}\n```"


def limits(results: Path) -> str:
    """List each layout's step and the time that each of its parts would take by itself."""
    probes = probes_of(results)
    rows = []
    groups = by_layout(engine_groups(results, probes))
    for layout in (layout for layout in LAYOUTS if layout.name in groups):
        item = groups[layout.name].runs[0]
        parts = step_breakdown(item.result.run, item.metrics, probes) if item.metrics else None
        if parts is None or item.metrics is None:
            continue
        seconds = (parts.model_flops, parts.bubble, parts.optimizer, parts.replicas, parts.tensor_ranks)
        step = item.metrics.step_seconds.value
        share = units.percent(parts.model_flops / step) if parts.model_flops else units.ABSENT
        rows.append(
            [f"`{layout.name}`", units.seconds(step), *(units.seconds(part) if part else units.ABSENT for part in seconds), share]
        )
    header = (
        "layout",
        "step",
        "arithmetic",
        "pipeline bubble",
        "optimizer",
        "between replicas",
        "between tensor ranks",
        "arithmetic / step",
    )
    return table(header, rows) if rows else NOTHING


def power(results: Path) -> str:
    """List each layout's mean power and its limit, as the run itself derived them from its readings."""
    rows = []
    for layout in LAYOUTS:
        for file in sorted(file for folder in OURS for file in (results / folder / layout.name).glob("benchmark_*.json")):
            document = json.loads(file.read_text(encoding="utf8"))
            metrics, limit = document["metrics"], document["run"]["machine"]["power_limit_watts"]
            if not metrics or not metrics["joules_per_token"]:
                continue
            watts = metrics["joules_per_token"] * metrics["tokens_per_second_per_gpu"]["value"]
            notes = "; ".join(text for text in metrics["warnings"] if "clocks" in text) or units.ABSENT
            notes = re.sub(r"(?<=\d)%", " %", notes)  # as the files of the first versions have them
            rows.append([f"`{layout.name}`", f"{watts:.0f} W", f"{limit:.0f} W" if limit else units.ABSENT, notes])
    return table(("layout", "mean power per GPU", "power limit", "readings of the whole run"), rows) if rows else NOTHING


def callback(results: Path) -> str:
    """List the cost of recording per step: the same training with and without it, in turn."""
    rows = []
    shortest = min(
        (item.metrics.step_seconds.value for group in engine_groups(results) for item in group.runs if item.metrics),
        default=None,
    )
    for file in sorted((results / "callback").glob("*.json")):
        document = json.loads(file.read_text(encoding="utf8"))
        medians, cost = document["median_step_seconds"], document["cost_seconds_per_step"]
        without, with_it = (
            f"{min(medians[side]) * 1e3:.2f} to {max(medians[side]) * 1e3:.2f} ms" for side in ("without", "with")
        )
        share = units.ABSENT if shortest is None else units.percent(cost / shortest, 4)
        rows.append((document["device"], str(document["layers"]), without, with_it, f"{cost * 1e3:.3f} ms", share))
    header = ("GPU", "layers", "step without, by round", "step with, by round", "cost per step")
    return table((*header, "of the shortest step of a layout"), rows) if rows else NOTHING


STAGES = {
    "rank_started": "ranks started",
    "imported": "libraries imported",
    "process_group": "process group ready",
    "model_built": "model built",
    "training": "first step begins",
}


def first_steps(results: Path) -> str:
    """List the time from a run's start to the end of its first step, and that step's own time."""
    rows = [
        [f"`{name}`", units.seconds(seconds), units.seconds(first.step_seconds), graphs(group.run)]
        for name, group in by_layout(engine_groups(results)).items()
        if (first := group.runs[0].result.steps[0]) and (seconds := first.ended_at_seconds) is not None
    ]
    return table(("layout", "end of the first step", "first step", "graphs compiled / from cache"), rows) if rows else NOTHING


def graphs(run: RunRecord) -> str:
    """Describe how warm the compile cache was."""
    seen = run.evidence
    if seen is None or seen.graphs_compiled is None:
        return units.ABSENT
    return f"{seen.graphs_compiled} / {seen.graphs_from_cache}"


def start_up(results: Path) -> str:
    """List the time from the start of each run to each stage of its start-up, in order of the runs."""
    starts = [(folder.name, group) for folder in (results / "start-up").glob("*/") for group in groups_in(folder, [])]
    rows = []
    for name, group in sorted(starts, key=lambda pair: pair[1].run.started_at or ""):
        for result in (item.result for item in group.runs):
            stages = [units.seconds(result.run.start_up[stage]) for stage in STAGES]
            first, last = (result.steps[place].ended_at_seconds or 0 for place in (0, -1))
            after = units.seconds(duration_seconds(result.run) - last)
            rows.append([name, *stages, units.seconds(first), graphs(result.run), after])
    header = (
        "compile cache",
        *STAGES.values(),
        "first step ends",
        "graphs compiled / from cache",
        "last step to end of run",
    )
    return table(header, rows) + earlier_import_times(results) if rows else NOTHING


def duration_seconds(run: RunRecord) -> float:
    """Return the seconds from a run's start to its end."""
    start, end = (datetime.fromisoformat(moment or "") for moment in (run.started_at, run.ended_at))
    return (end - start).total_seconds()


def earlier_import_times(results: Path) -> str:
    """State how long imports took in runs that imported all of torchmetrics; empty without such runs."""
    starts = [item.result.run.start_up for group in groups_in(results / "switches" / "one", []) for item in group.runs]
    seconds = sorted(start["imported"] - start["rank_started"] for start in starts if "imported" in start)
    if not seconds:
        return ""
    span = f"{units.seconds(seconds[0])} to {units.seconds(seconds[-1])}"
    return f"\n\nIn the {len(seconds)} runs of `switches/one`, from before imports were reduced, importing libraries took {span}."


BLOCKS = {
    "answer": answer,
    "leads": leads,
    "choices_of_steps": choices_of_steps,
    "earlier_leads": earlier_leads,
    "answer_h100": lambda results: answer(results.parent / "h100"),
    "leads_h100": lambda results: leads(results.parent / "h100"),
    "choices_of_steps_h100": lambda results: choices_of_steps(results.parent / "h100"),
    "earlier_leads_h100": lambda results: earlier_leads(results.parent / "h100"),
    "losses": losses,
    "output_layer": output_layer,
    "cuda_graphs": cuda_graphs,
    "graph_losses": graph_losses,
    "queues": queues,
    "callback": callback,
    "layouts": layouts,
    "layouts_on_two": layouts_on_two,
    "switches": switches,
    "no_gain": no_gain,
    "profiles": profiles,
    "parts_of_tp4": parts_of_tp4,
    "exchanges": exchanges,
    "exchanges_as_graphs": exchanges_as_graphs,
    "copy_streams": copy_streams,
    "limits": limits,
    "power": power,
    "energy": energy,
    "first_steps": first_steps,
    "start_up": start_up,
    "forward_sums": forward_sums,
    "unswitched": unswitched,
}


def main() -> int:
    """Exit status: 0, or 1 where --check finds a difference."""
    parser = page_parser(__doc__)
    parser.add_argument("--page", type=Path, help="only this one")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "records" / "h200")
    options = parser.parse_args()
    status = 0
    for page in [options.page] if options.page else PAGES:
        before = page.read_text(encoding="utf8")
        text = replace_blocks(before, "figures", lambda name: f"\n{BLOCKS[name](options.results)}\n\n")
        status |= update_page(page, text, check=options.check, command="python3 tools/performance_page.py")
    return status


if __name__ == "__main__":
    sys.exit(main())
