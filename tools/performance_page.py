#!/usr/bin/env python3
"""Write the figures of docs/performance.md from the records in results/h200; with --check, only say whether they are up to date.

python3 tools/performance_page.py
python3 tools/performance_page.py --check

A block of figures stands between <!-- figures NAME --> and <!-- end -->; the prose around it is written by hand.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]

from record_figures import NOTHING, OURS, by_layout, engine_groups, groups_in, probes_of, rate, steps, times  # noqa: E402
from speed_layouts import LAYOUTS, Layout  # noqa: E402
from start_figures import first_steps, micro_batch_search, start_up  # noqa: E402
from switch_figures import exchanges, forward_sums, no_gain, switches, unswitched  # noqa: E402

from tprimat import units  # noqa: E402
from tprimat.analyze.compare import verdict  # noqa: E402
from tprimat.analyze.groups import Group, group_estimate  # noqa: E402
from tprimat.analyze.roofline import step_breakdown  # noqa: E402
from tprimat.analyze.trace import ProfileSummary  # noqa: E402
from tprimat.records.files import from_json  # noqa: E402
from tprimat.report.tables import table, with_interval  # noqa: E402
from tprimat.report.trace import markdown  # noqa: E402

BLOCK = re.compile(r"(<!-- figures (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


MEASURED = (
    "layout",
    "tokens/s/GPU",
    "n",
    "TFLOP/s/GPU",
    "MFU",
    "of measured matmul",
    "memory",
    "torchtitan",
    "its n",
    "ours / theirs",
    "reserved, ours / theirs",
)


def layouts(results: Path) -> str:
    """Each layout that was measured, beside torchtitan and its target."""
    probes = probes_of(results)
    rows = layout_rows(engine_groups(results, probes), groups_in(results / "torchtitan", probes))
    return table((*MEASURED, "target", "reached"), rows) if rows else NOTHING


def layouts_on_two(results: Path) -> str:
    """The same on two GPUs, for which there are no targets."""
    probes, folder = probes_of(results), results / "two-gpus"
    rows = layout_rows(engine_groups(folder, probes), groups_in(folder / "torchtitan", probes))
    return table(MEASURED, [row[: len(MEASURED)] for row in rows]) if rows else NOTHING


def layout_rows(groups: list[Group], peers: list[Group]) -> list[list[str]]:
    """A line for each layout of ours."""
    ours, theirs = by_layout(groups), by_layout(peers)
    return [layout_row(layout, ours[layout.name], theirs.get(layout.name)) for layout in LAYOUTS if layout.name in ours]


def layout_row(layout: Layout, group: Group, peer: Group | None) -> list[str]:
    """One line."""
    metrics = [item.metrics for item in group.runs if item.metrics]
    flops, mfu, own = (
        group_estimate(group, lambda made: made.model_flops_per_second_per_gpu),
        group_estimate(group, lambda made: made.mfu),
        rate(group),
    )
    shares = [made.share_of_measured_gemm for made in metrics if made.share_of_measured_gemm]
    ratio = verdict(peer, group, even_if_different=True).ratio if peer else None
    wanted = layout.target_mfu or layout.target_tokens_per_second_per_gpu
    reached = mfu if layout.target_mfu else own
    return [
        f"`{layout.name}`",
        with_interval(own, units.count),
        steps(group),
        f"{flops.value / 1e12:.0f}" if flops else units.ABSENT,
        units.percent(mfu.value) if mfu else units.ABSENT,
        units.percent(sum(shares) / len(shares)) if shares else units.ABSENT,
        units.gibibytes(max(made.peak_memory_bytes or 0 for made in metrics) or None),
        with_interval(rate(peer), units.count) if peer else units.ABSENT,
        steps(peer) if peer else units.ABSENT,
        with_interval(ratio, times),
        f"{reserved(group)} / {reserved(peer)}" if peer else units.ABSENT,
        target(layout),
        units.percent(reached.value / wanted) if reached and wanted else units.ABSENT,
    ]


def reserved(group: Group) -> str:
    """Peak of what torch's allocator holds, which is what torchtitan tells."""
    return units.gibibytes(max(item.metrics.peak_reserved_bytes or 0 for item in group.runs if item.metrics) or None)


def target(layout: Layout) -> str:
    """In the unit in which it was set."""
    if layout.target_mfu:
        return f"{units.percent(layout.target_mfu, 0)} MFU"
    return units.count(layout.target_tokens_per_second_per_gpu)


def profiles(results: Path) -> str:
    """What one step is spent on."""
    found = {
        path.stem: from_json(ProfileSummary, path.read_text(), where=str(path))
        for path in sorted((results / "profiles").glob("*.json"))
    }
    return markdown(found) if found else NOTHING


def limits(results: Path) -> str:
    """A step beside what its parts would take alone."""
    probes = probes_of(results)
    rows = []
    found = by_layout(engine_groups(results, probes))
    for layout in (layout for layout in LAYOUTS if layout.name in found):
        item = found[layout.name].runs[0]
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
    """What the GPUs drew while each layout ran, beside their limit; from what the run itself derived, which saw the readings."""
    rows = []
    for layout in LAYOUTS:
        for file in sorted(file for folder in OURS for file in (results / folder / layout.name).glob("benchmark_*.json")):
            found = json.loads(file.read_text(encoding="utf8"))
            metrics, limit = found["metrics"], found["run"]["machine"]["power_limit_watts"]
            if not metrics or not metrics["joules_per_token"]:
                continue
            watts = metrics["joules_per_token"] * metrics["tokens_per_second_per_gpu"]["value"]
            notes = "; ".join(text for text in metrics["warnings"] if "clocks" in text) or units.ABSENT
            rows.append([f"`{layout.name}`", f"{watts:.0f} W", f"{limit:.0f} W" if limit else units.ABSENT, notes])
    return table(("layout", "drawn by a GPU, mean", "its limit", "readings of the whole run"), rows) if rows else NOTHING


def callback(results: Path) -> str:
    """What recording costs a step: the same training with and without it, in turn."""
    rows = []
    shortest = min(
        (item.metrics.step_seconds.value for group in engine_groups(results) for item in group.runs if item.metrics),
        default=None,
    )
    for file in sorted((results / "callback").glob("*.json")):
        found = json.loads(file.read_text(encoding="utf8"))
        medians, cost = found["median_step_seconds"], found["cost_seconds_per_step"]
        without, with_it = (
            f"{min(medians[side]) * 1e3:.2f} .. {max(medians[side]) * 1e3:.2f} ms" for side in ("without", "with")
        )
        share = "–" if shortest is None else f"{cost / shortest * 100:.4f} %"
        rows.append((found["device"], str(found["layers"]), without, with_it, f"{cost * 1e3:.3f} ms", share))
    header = ("GPU", "layers", "step without, by round", "step with, by round", "cost", "of the shortest step in the first table")
    return table(header, rows) if rows else NOTHING


BLOCKS = {
    "callback": callback,
    "layouts": layouts,
    "layouts_on_two": layouts_on_two,
    "switches": switches,
    "no_gain": no_gain,
    "profiles": profiles,
    "exchanges": exchanges,
    "limits": limits,
    "power": power,
    "first_steps": first_steps,
    "start_up": start_up,
    "micro_batch_search": micro_batch_search,
    "forward_sums": forward_sums,
    "unswitched": unswitched,
}


def rewritten(page: str, results: Path) -> str:
    """The page with every block made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]](results)}\n\n{match[3]}", page)


def main() -> int:
    """Returns: 1 if --check finds a block that differs from its records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "h200")
    options = parser.parse_args()
    before = options.page.read_text(encoding="utf8")
    after = rewritten(before, options.results)
    if options.check:
        if before != after:
            print(f"{options.page.name} does not hold what the records say: python3 tools/performance_page.py", file=sys.stderr)
        return 0 if before == after else 1
    options.page.write_text(after, encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
