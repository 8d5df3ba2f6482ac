"""CUDA graphs beside launches by Python, with both kinds of layers: tables of benchmarks/results/performance.md."""

from itertools import combinations, product
from pathlib import Path

from engine_speed import memory_cell
from record_figures import NOTHING, groups_in, rate, repeated, times
from speed_programs import GRAPHS, TRANSFORMER_ENGINE

from tprimat.analyze.compare import Question, verdict
from tprimat.analyze.groups import Group, Measured
from tprimat.core import units
from tprimat.engines import megatron
from tprimat.report.catalogue import ENERGY
from tprimat.report.tables import table

MACHINES = (
    *(f"cuda-graphs/{name}-machine" for name in ("first", "second", "third", "fourth")),
    "in-turn-two-gpus",
    "../h100/in-turn-two-gpus",
    "../h100/in-turn-four-gpus",
    "../h100/in-turn-four-gpus-later",
    "in-turn-four-gpus-later",
)
"""Folders whose runs with graphs are from one machine each, as PROGRAM/LAYOUT/ROUND; beside the records of H200."""
LAYOUTS = ("dp_mbs1", "tp2_mbs4", "tp2_mbs2", "tp4_mbs4", "tp4_mbs4_fp8", "tp2_mbs4_fp8", "dp_mbs2_fp8")
WORDS = {
    megatron.ENGINE.name: "embedded engine",
    f"{megatron.ENGINE.name}{GRAPHS}": "embedded engine, CUDA graphs",
    TRANSFORMER_ENGINE: "Transformer Engine's layers",
    f"{TRANSFORMER_ENGINE}{GRAPHS}": "Transformer Engine's layers, CUDA graphs",
}
EARLY_STEPS = 5
"""Later, losses of two runs of one program differ, too: the learning rate still rises."""


def _runs(folder: Path) -> Group | None:
    return next(iter(groups_in(folder, ())), None)


def _programs(results: Path, machine: str, layout: str) -> dict[str, Group]:
    """Read what ran on a machine, by program; of series with other layouts, too, only what also ran as graphs."""
    groups = {name: group for name in WORDS if (group := _runs(results / machine / name / layout))}
    return groups if machine.startswith("cuda-graphs/") or any(name.endswith(GRAPHS) for name in groups) else {}


def _ratio(group: Group | None, base: Group | None) -> str:
    if group is None or base is None or group is base:
        return units.ABSENT
    return repeated(verdict(base, group, Question(even_if_different=True)).ratio, times, group, base)


def cuda_graphs(results: Path) -> str:
    """List each layout on each machine, with the ratios of programs that ran there."""
    rows = []
    for layout, (number, machine) in product(LAYOUTS, enumerate(MACHINES, start=1)):
        groups = _programs(results, machine, layout)
        for name, group in groups.items():
            joules = ENERGY.value(group)
            ours = not name.startswith(TRANSFORMER_ENGINE)
            rows.append(
                [
                    f"`{layout}`",
                    str(number),
                    WORDS[name],
                    str(len(group.runs)),
                    repeated(rate(group), units.count, group),
                    units.si(joules, "J") if joules else units.ABSENT,
                    memory_cell([item.metrics for item in group.runs if item.metrics]),
                    _ratio(group, groups.get(name.removesuffix(GRAPHS))),
                    *(_ratio(group, groups.get(f"{TRANSFORMER_ENGINE}{how}") if ours else None) for how in ("", GRAPHS)),
                ]
            )
    header = ("layout", "machine", "program", "runs", "tokens/s/GPU", "energy/token", "memory", "with graphs / without")
    header += ("engine / TE's layers", "engine / TE's layers, CUDA graphs")
    return table(header, rows, left=3) if rows else NOTHING


def graph_losses(results: Path) -> str:
    """List how far losses with graphs are from those without, on any of the machines, and those of like runs from each other."""
    rows = []
    for layout, program in product(LAYOUTS, (megatron.ENGINE.name, TRANSFORMER_ENGINE)):
        usual, recorded = (_items_by_gpus(results, name, layout) for name in (program, program + GRAPHS))
        for gpus in sorted(usual.keys() & recorded.keys()):
            without, with_them = usual[gpus], recorded[gpus]
            pairs = list(product(without, with_them)), [*combinations(without, 2), *combinations(with_them, 2)]
            spans = (slice(EARLY_STEPS), slice(EARLY_STEPS, None))
            cells = [_largest_difference(some, span) for span in spans for some in pairs]
            rows.append([f"`{layout}`", str(gpus), WORDS[program], f"{len(with_them)} / {len(without)}", *cells])
    header = ("layout", "GPUs", "program", "runs with / without")
    header += (f"steps 1 to {EARLY_STEPS}: with from without", "like runs", "later: with from without", "like runs")
    return table(header, rows, left=3) if rows else NOTHING


def _items_by_gpus(results: Path, program: str, layout: str) -> dict[int, list[Measured]]:
    """Read a program's runs on any machine by the number of GPUs: batches of as many sequences."""
    items: dict[int, list[Measured]] = {}
    for group in (_programs(results, machine, layout).get(program) for machine in MACHINES):
        if group:
            items.setdefault(group.run.machine.gpus, []).extend(group.runs)
    return items


def _largest_difference(pairs: list[tuple[Measured, Measured]], span: slice) -> str:
    losses = ([[step.loss for step in item.result.steps[span]] for item in pair] for pair in pairs)
    gaps = [abs(one / other - 1) for first, second in losses for one, other in zip(first, second, strict=True) if one and other]
    return units.percent(max(gaps), digits=3) if gaps else units.ABSENT


def queues(results: Path) -> str:
    """List runs with CUDA_DEVICE_MAX_CONNECTIONS at 1, as Megatron-LM wants it, and at 8, which is CUDA's default."""
    rows = []
    for folder in sorted((results / "unswitched" / "eight-queues").glob("*/*/")):
        program, layout = folder.parent.name, folder.name
        one, eight = _runs(results / MACHINES[1] / program / layout), _runs(folder)
        if one and eight:
            rates = [repeated(rate(group), units.count, group) for group in (one, eight)]
            rows.append([f"`{layout}`", WORDS[program], *rates, f"{len(one.runs)} / {len(eight.runs)}", _ratio(eight, one)])
    header = ("layout", "program", "1 queue, tokens/s/GPU", "8 queues, tokens/s/GPU", "runs", "8 / 1")
    return table(header, rows, left=2) if rows else NOTHING
