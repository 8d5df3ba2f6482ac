"""The embedded engine beside the programs that ran in turn with it: benchmarks/results/performance.md's first table."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from engine_speed import COMPARED, memory_cell, teraflops
from record_figures import NOTHING, groups_in, probes_of, rate, repeated, times
from speed_layouts import LAYOUTS, Layout
from speed_programs import FINDERS, GRAPHS

from tprimat.analyze.compare import Question, verdict
from tprimat.analyze.groups import Group, group_estimate
from tprimat.analyze.traits import accelerator_name
from tprimat.core import units
from tprimat.core.statistics import FEWEST_RUNS, rate_of, ratio_of_rates
from tprimat.engines import bridge, megatron, megatron_lm, nemo, torchtitan
from tprimat.records.schema import Estimate, ProbeRecord, RunRecord
from tprimat.report.catalogue import ENERGY, MATMUL_SHARE
from tprimat.report.tables import plural, table

SERIES = (
    "in-turn-four-gpus-peers",
    "in-turn-bridge",
    "in-turn-four-gpus-later",
    "in-turn-four-gpus-slow-host",
    "in-turn-four-gpus",
    "in-turn-four-programs",
    "in-turn-two-gpus",
    "cuda-graphs/third-machine",
    "in-turn-nemo",
    "in-turn",
    "fp8-current-scaling",
    "with-transformer-engine",
    "earlier",
)
"""Folders of runs made in turn, newest first: the files that engine_speed.py leaves, as PROGRAM/LAYOUT/ROUND.

benchmarks/results/performance.md shows each peer of a layout on a number of GPUs from the first folder that has it, beside the
engine's runs of that folder, and performance-earlier.md what later folders have of the same peers.
"""
DELAYED = "in-turn-delayed"
"""Runs in fp8 whose Transformer Engine's layers scaled by the maxima of earlier steps; the engine by those of each tensor."""
OURS = megatron.ENGINE.name
PROGRAMS = (OURS, *(name for name in FINDERS if not name.endswith(GRAPHS)))
WORDS = {
    OURS: "embedded engine",
    "transformer_engine": "the same with Transformer Engine's layers",
    nemo.ENGINE.name: "NeMo",
    bridge.ENGINE.name: "Megatron-Bridge, tuned recipe",
    megatron_lm.ENGINE.name: "Megatron-LM",
}
WITH_OUTPUT = {
    "off": WORDS[OURS],
    "on": "embedded engine, output layer in fp8",
    "te": WORDS["transformer_engine"],
}
PEERS = {
    "transformer_engine": "Transformer Engine's layers",
    nemo.ENGINE.name: "NeMo's recipe",
    bridge.ENGINE.name: "Megatron-Bridge's tuned recipe",
    megatron_lm.ENGINE.name: "Megatron-LM",
    torchtitan.ENGINE.name: "torchtitan",
}
MOST_BY_CHOICE = 0.01
"""How far a ratio may depend on the choice of steps without being listed."""
OF_MATMUL = "of measured matmul"
SPEED = "TFLOP/s/GPU (MFU)"
HEADER = ("layout", "GPUs", "measured", "program", "runs", "tokens/s/GPU", SPEED, OF_MATMUL, "memory", "energy/token")
OF_A_MACHINE = ("accelerator", "nodes", "power-limit", "driver")
"""Traits that all programs of a series share: where they differ, a ratio would be that of machines."""
RATIO = "embedded engine / this"


def answer(results: Path) -> str:
    """Tabulate how many times as fast as each peer the engine is, by dtype, and say in which layouts it is slower.

    The table has comparisons with enough runs; the intervals' ends tell how sure the ratios are.
    """
    compared = list(_newest(results))
    delayed = [(layout, _programs(results / DELAYED, layout, ())) for layout in LAYOUTS if _has_delayed(results, layout)]
    ratios: dict[tuple[str, str], list[Estimate]] = {}
    slower = []
    for name, words in PEERS.items():
        for (layout, programs), scaling in [*((one, "current") for one in compared), *((one, "delayed") for one in delayed)]:
            peer, ours = programs.get(name), programs[OURS]
            ratio = _ratio(peer, ours) if peer else None
            if peer is None or ratio is None:
                continue
            runs = plural(min(len(peer.runs), len(ours.runs)), "run")
            if _ran_often(peer, ours):
                more = f", {scaling} scaling" if layout.precision == "fp8" else ", experts" if layout.expert > 1 else ""
                ratios.setdefault((of_version(words, peer), f"{layout.precision}{more}"), []).append(ratio)
            if ratio.value < 1 and scaling == "current":
                sure, there = repeated(ratio, times, peer, ours), of_version(words, peer)
                slower.append(f"In `{layout.name}` the engine runs at {sure} times the speed of {there} ({runs} a side).")
    if not ratios:
        return " ".join(slower) or NOTHING
    rows = [
        [*what, str(len(some)), _ends(one.value for one in some), _ends(end for one in some for end in (one.low, one.high))]
        for what, some in ratios.items()
    ]
    machines = " and ".join(sorted({_machine(programs[OURS].run) for _, programs in compared}))
    intro = f"On {machines}, in comparisons with at least {FEWEST_RUNS} runs a side:"
    listed = table(("embedded engine beside", "in", "comparisons", "times its tokens/s", "95 % intervals"), rows, left=2)
    return "\n\n".join([intro, listed, *([" ".join(slower)] if slower else [])])


def of_version(words: str, group: Group) -> str:
    """Name the release of Transformer Engine where words name it."""
    installed = group.run.software.get("transformer-engine", "").split(".")[:2]
    return words.replace("Transformer Engine's", f"Transformer Engine {'.'.join(installed)}'s") if installed != [""] else words


def _machine(run: RunRecord) -> str:
    limit = run.machine.power_limit_watts
    return f"{accelerator_name(run)}{f' at {limit:.0f} W' if limit else ''}"


def _has_delayed(results: Path, layout: Layout) -> bool:
    return (results / DELAYED / OURS / layout.name).is_dir()


def _ran_often(*groups: Group) -> bool:
    return min(len(group.runs) for group in groups) >= FEWEST_RUNS


def _ends(values: Iterable[float | None]) -> str:
    """Write the smallest and the largest of some ratios, or the only one."""
    every = [value for value in values if value is not None]
    return " to ".join(dict.fromkeys(map(times, (min(every), max(every)))))


def leads(results: Path) -> str:
    """List what ran in turn, by layout, the embedded engine first."""
    rows: list[list[str]] = []
    probes = probes_of(results)
    compared = list(_newest(results, probes))
    for layout in LAYOUTS:
        for _, programs in (pair for pair in compared if pair[0] is layout):
            rows += _rows(layout, programs)
        if _has_delayed(results, layout):
            rows += _rows(layout, _programs(results / DELAYED, layout, probes), ", delayed scaling")
    return _table(rows)


def earlier_leads(results: Path) -> str:
    """List what has been measured again since, in the same way."""
    again = [pair for *pair, newest in _measured(results, probes_of(results)) if not newest]
    return _table([row for layout, programs in again for row in _rows(layout, programs)]) if again else NOTHING


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return the table, without a column that no row fills."""
    places = [place for place, name in enumerate(HEADER) if name != OF_MATMUL or any(row[place] != units.ABSENT for row in rows)]
    kept = [*places, len(HEADER)]
    header = (*HEADER, RATIO)
    return table([header[place] for place in kept], [[row[place] for place in kept] for row in rows], left=4)


def _newest(results: Path, probes: Sequence[ProbeRecord] = ()) -> Iterator[tuple[Layout, dict[str, Group]]]:
    """Yield the newest groups of each layout and number of GPUs, by program: once for each folder that has a peer's newest."""
    yield from ((layout, programs) for layout, programs, newest in _measured(results, probes) if newest)


def _measured(results: Path, probes: Sequence[ProbeRecord]) -> Iterator[tuple[Layout, dict[str, Group], bool]]:
    """Yield the groups of each layout, number of GPUs and folder, by program: peers not seen before with True, others with False.

    The engine's runs in that folder are among either.
    """
    for layout in LAYOUTS:
        by_gpus: dict[int, list[dict[str, Group]]] = {}
        for folder in (results / name for name in SERIES if (results / name / OURS / layout.name).is_dir()):
            programs = _programs(folder, layout, probes)
            by_gpus.setdefault(programs[OURS].run.machine.gpus, []).append(programs)
        for _, by_age in sorted(by_gpus.items()):
            seen: set[str] = set()
            for programs in by_age:
                new = {name: group for name, group in programs.items() if name not in seen}
                seen |= new.keys() - {OURS}
                old = {OURS: programs[OURS], **{name: group for name, group in programs.items() if name not in new}}
                newest = programs is by_age[0] or len(new) > 1
                if newest:
                    yield layout, new, True
                if len(old) > 1 or not newest:
                    yield layout, old, False


def _programs(folder: Path, layout: Layout, probes: Sequence[ProbeRecord]) -> dict[str, Group]:
    """Read the runs of a layout in one folder, by program."""
    by_program = {name: groups_in(folder / name / layout.name, probes) for name in PROGRAMS}
    for name, groups in by_program.items():
        if len(groups) > 1 or (name == OURS and not groups):
            raise SystemExit(f"{folder / name / layout.name} holds {len(groups)} configurations that count, not one")
    return {name: groups[0] for name, groups in by_program.items() if groups}


def _ratio(peer: Group, ours: Group) -> Estimate | None:
    """Return how many times as fast as a peer the engine is.

    None where they ran on unlike machines, differ in what forbids it, or where torch updated one side's weights in one kernel and
    the other's in many: with states in bf16, runs of older versions with Transformer Engine's layers did.
    """
    compared = verdict(peer, ours, COMPARED)
    options = [group.run.engine_options for group in (peer, ours)]
    kernels = {one.get("fused_adam") for one in options if one.get("optimizer_states") == "bf16"}
    unlike = len(kernels) > 1 or any(trait.key in OF_A_MACHINE for trait in compared.traits)
    return None if unlike else compared.ratio


def _rows(layout: Layout, programs: dict[str, Group], of_peers: str = "") -> Iterator[list[str]]:
    ours = programs[OURS]
    for name, group in programs.items():
        flops = group_estimate(group, lambda run: run.model_flops_per_second_per_gpu)
        mfu = group_estimate(group, lambda run: run.mfu)
        share = MATMUL_SHARE.value(group)
        joules = ENERGY.value(group)
        ratio = _ratio(group, ours) if group is not ours else None
        yield [
            f"`{layout.name}`",
            str(group.run.machine.gpus),
            (group.run.started_at or "")[:10],
            of_version(WORDS.get(name, name), group) + (of_peers if group is not ours else ""),
            str(len(group.runs)),
            repeated(rate(group), units.count, group),
            f"{teraflops(flops.value)} ({units.percent(mfu.value)})" if flops and mfu else units.ABSENT,
            units.percent(share) if share else units.ABSENT,
            memory_cell([item.metrics for item in group.runs if item.metrics]),
            units.si(joules, "J") if joules else units.ABSENT,
            repeated(ratio, times, group, ours) if ratio else units.ABSENT,
        ]


def choices_of_steps(results: Path) -> str:
    """List the comparisons whose ratio depends by more than MOST_BY_CHOICE on which steps of the runs count."""
    rows = []
    for layout, programs in _newest(results):
        ours, peer = programs[OURS], programs.get("transformer_engine")
        if peer is None or not _ran_often(ours, peer) or (usual := _ratio(peer, ours)) is None:
            continue
        after_the_first, fastest = (
            _ratio_by(peer, ours, steps) for steps in (lambda every: every[1:], lambda every: [min(every)])
        )
        ratios = (usual, after_the_first, fastest)
        if max(one.value for one in ratios) / min(one.value for one in ratios) > 1 + MOST_BY_CHOICE:
            rows.append([f"`{layout.name}`", str(ours.run.machine.gpus), *(repeated(one, times, ours) for one in ratios)])
    header = ("layout", "GPUs", "steady steps", "all steps after the first", "each run's fastest step")
    return table(header, rows, left=2) if rows else NOTHING


def _ratio_by(peer: Group, ours: Group, choose: Callable[[list[float]], list[float]]) -> Estimate:
    """Return how many times as fast as a peer the engine is, by other steps than the steady ones."""
    rates = []
    for group in (peer, ours):
        seconds = [np.array(choose([step.step_seconds for step in item.result.steps])) for item in group.runs]
        rates.append([rate_of(np.ones(len(some)), some) for some in seconds])
    ratio = ratio_of_rates(*rates)
    return Estimate(value=ratio.value, low=ratio.low, high=ratio.high, samples=len(ours.runs))


def _by_version(folder: Path) -> Iterator[dict[str, Group]]:
    """Yield the groups of one version of the code after the other, by variant."""
    variants = {name: sorted(groups_in(folder / name, ()), key=lambda group: group.run.started_at or "") for name in WITH_OUTPUT}
    for groups in zip(*variants.values(), strict=True):
        yield dict(zip(variants, groups, strict=True))


def output_layer(results: Path) -> str:
    """List runs in turn with the output layer in bf16, in fp8, and with Transformer Engine's layers, which have it in bf16."""
    rows = []
    for programs in (one for folder in sorted((results / "output-layer").glob("*/")) for one in _by_version(folder)):
        peer = programs["te"]
        for name, group in programs.items():
            joules = ENERGY.value(group)
            ratio = verdict(peer, group, Question(even_if_different=True)).ratio if group is not peer else None
            flops = group_estimate(group, lambda run: run.model_flops_per_second_per_gpu)
            rows.append(
                [
                    f"s{group.run.ran.sequence_tokens} MBS{group.run.ran.micro_batch_sequences}",
                    WITH_OUTPUT[name],
                    str(len(group.runs)),
                    repeated(rate(group), units.count, group),
                    teraflops(flops.value) if flops else units.ABSENT,
                    units.si(joules, "J") if joules else units.ABSENT,
                    memory_cell([item.metrics for item in group.runs if item.metrics]),
                    repeated(ratio, times, group, peer) if ratio else units.ABSENT,
                ]
            )
    header = ("workload", "program", "runs", "tokens/s/GPU", "TFLOP/s/GPU", "energy/token", "memory")
    return table((*header, "this / Transformer Engine's layers"), rows, left=2)
