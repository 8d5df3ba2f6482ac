"""CUDA graphs beside launches by Python, with both kinds of layers: a table of docs/performance.md."""

from pathlib import Path

from engine_speed import memory_cell
from record_figures import NOTHING, groups_in, rate, repeated, times
from speed_programs import TRANSFORMER_ENGINE

from tprimat import units
from tprimat.analyze.compare import Question, verdict
from tprimat.analyze.groups import Group, group_mean
from tprimat.engines import embedded
from tprimat.report.tables import table

MACHINES = ("cuda-graphs/first-machine", "cuda-graphs/second-machine", "in-turn-two-gpus")
"""Folders of runs made in turn on one machine, as PROGRAM/LAYOUT/ROUND."""
LAYOUTS = ("dp_mbs1", "tp2_mbs4", "dp_mbs2_fp8")
GRAPHS = "-graphs"
QUEUES = "-eight-queues"
WORDS = {
    embedded.ENGINE.name: "embedded engine",
    f"{embedded.ENGINE.name}{GRAPHS}": "embedded engine, CUDA graphs",
    TRANSFORMER_ENGINE: "Transformer Engine's layers",
    f"{TRANSFORMER_ENGINE}{GRAPHS}": "Transformer Engine's layers, CUDA graphs",
}
EARLY_STEPS = 5
"""Later, losses of two runs of one program differ, too: the learning rate still rises."""


def _runs(results: Path, machine: str, program: str, layout: str) -> Group | None:
    return next(iter(groups_in(results / machine / program / layout, ())), None)


def _ratio(group: Group | None, base: Group | None) -> str:
    if group is None or base is None:
        return units.ABSENT
    return repeated(verdict(base, group, Question(even_if_different=True)).ratio, times, group, base)


def _loss_difference(results: Path, program: str, group: Group) -> str:
    """Return the largest relative difference of a loss in the first steps from a run without graphs, on any of the machines."""
    layout = group.run.strategy or ""
    usual = (_runs(results, machine, program.removesuffix(GRAPHS), layout) for machine in MACHINES)
    others = next(filter(None, usual), None)
    if others is None or not program.endswith(GRAPHS):
        return units.ABSENT
    losses = [step.loss for step in others.runs[0].result.steps[:EARLY_STEPS]]
    pairs = (zip(losses, item.result.steps, strict=False) for item in group.runs)
    return units.percent(max(abs(step.loss / loss - 1) for pair in pairs for loss, step in pair if loss and step.loss), digits=3)


def cuda_graphs(results: Path) -> str:
    """List each layout on each machine where a program ran with and another without graphs, or two kinds of layers did."""
    rows = []
    for layout in LAYOUTS:
        for number, machine in enumerate(MACHINES, start=1):
            found = {name: group for name in WORDS if (group := _runs(results, machine, name, layout))}
            rivals = [group for name, group in found.items() if name.startswith(TRANSFORMER_ENGINE)]
            fastest = max(rivals, key=lambda group: estimate.value if (estimate := rate(group)) else 0, default=None)
            for name, group in found.items() if len(found) > 1 else ():
                joules = group_mean(group, lambda run: run.joules_per_token)
                usual = found.get(name.removesuffix(GRAPHS)) if name.endswith(GRAPHS) else None
                rows.append(
                    [
                        f"`{layout}`",
                        str(number),
                        WORDS[name],
                        str(len(group.runs)),
                        repeated(rate(group), units.count, group),
                        units.si(joules, "J") if joules else units.ABSENT,
                        memory_cell([item.metrics for item in group.runs if item.metrics]),
                        _ratio(group, usual),
                        _ratio(group, None if group in rivals else fastest),
                        _loss_difference(results, name, group),
                    ]
                )
    header = ("layout", "machine", "program", "runs", "tokens/s/GPU", "energy/token", "memory", "with graphs / without")
    header += ("engine / the faster of TE's rows", f"loss, steps 1 to {EARLY_STEPS}")
    return table(header, rows, left=3) if rows else NOTHING


def queues(results: Path) -> str:
    """List runs with CUDA_DEVICE_MAX_CONNECTIONS at 1, as Megatron-LM wants it, and at 8, which is CUDA's default."""
    rows = []
    for machine in MACHINES:
        for folder in sorted((results / machine).glob(f"*{QUEUES}/*/")):
            program, layout = folder.parent.name.removesuffix(QUEUES), folder.name
            one, eight = (_runs(results, machine, name, layout) for name in (program, folder.parent.name))
            if one and eight:
                rates = [repeated(rate(group), units.count, group) for group in (one, eight)]
                runs = f"{len(one.runs)} / {len(eight.runs)}"
                rows.append([f"`{layout}`", WORDS[program], *rates, runs, _ratio(eight, one)])
    header = ("layout", "program", "1 queue, tokens/s/GPU", "8 queues, tokens/s/GPU", "runs", "8 / 1")
    return table(header, rows, left=2) if rows else NOTHING
