"""tprimat doctor --nodes: every GPU of some nodes against its neighbours, named where it is slower."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tprimat.core import units
from tprimat.core.errors import LaunchError
from tprimat.engines.base import Command
from tprimat.hardware.health import Check
from tprimat.hardware.nodes import find_nodes, this_machine, told_nodes
from tprimat.launch.command import python_environment, run_command
from tprimat.launch.torchrun import torchrun

MARK = "tprimat health: "
"""As tprimat/probe/health.py prints it; importing that would import torch."""
SLOWER = 0.05
"""How much slower than its neighbours a GPU is before it is named."""
LIMIT_SECONDS = 300.0
CPU_RANKS = 2
MEASURES = {
    "product_flops": ("matrix product", units.teraflops),
    "copy_bytes_per_second": ("memory", lambda value: f"{value / 1e9:,.0f} GB/s"),
    "node_reduce_bytes_per_second": ("node all-reduce", lambda value: f"{value / 1e9:,.1f} GB/s"),
}
"""Field of the measurement -> its name, and how a value is written."""


def examine_nodes(count: int | None, gpus: int | None, notify: Callable[[str], None]) -> list[Check]:
    """Measure all GPUs of this node, or with the others of a job, of all of them; only the first node has something to show.

    Args:
        count: of nodes; None: as many as the scheduler started this on, or one.
        gpus: on each node; None: all.
        notify: takes the output of the ranks where they fail; elsewhere it is noise, such as torchrun's traceback on the node
            that ends last.

    Raises:
        LaunchError: the nodes are not described, or the ranks failed.
    """
    told = told_nodes()
    place = find_nodes(count or (told[0] if told else 1))
    machine = this_machine()
    ranks = gpus or (machine.gpus_per_node if machine else None) or CPU_RANKS
    lines: list[str] = []
    command = Command(argv=(*torchrun(place, ranks), "-m", "tprimat.probe.health"), environment=python_environment(ranks))
    ending = run_command(command, lines.append, LIMIT_SECONDS)
    if ending.exit_code != 0 or ending.stopped:
        for line in lines:
            notify(line)
        last = next((line for line in reversed(lines) if line.strip()), "nothing was printed")
        why = ending.stopped.cause if ending.stopped else f"torchrun ended with status {ending.exit_code}: {last}"
        raise LaunchError("The ranks could not be measured.", why=why, fix="the same command on every node, or with srun")
    if place.rank > 0:
        return []
    document = next(line.removeprefix(MARK) for line in lines if line.startswith(MARK))
    return list(judged(json.loads(document), on_cpu=machine is None))


def judged(found: Sequence[dict[str, Any]], *, on_cpu: bool) -> Iterator[Check]:
    """Compare every rank with the median of all, measure by measure, and name those that are slower."""
    for field, (name, show) in MEASURES.items():
        values = {index: value for index, one in enumerate(found) if isinstance(value := one[field], int | float)}
        if not values:
            continue
        usual = statistics.median(values.values())
        finding = (
            f"{show(usual)} in the middle, {show(min(values.values()))} to {show(max(values.values()))}, {len(values)} ranks"
        )
        slow = [index for index, value in values.items() if value < usual * (1 - SLOWER)]
        if on_cpu or not slow:
            yield Check(name=name, status="ok", finding=finding + ("; CPU processes say nothing about speed" if on_cpu else ""))
            continue
        named = ", ".join(
            f"GPU {found[index]['gpu']} on {found[index]['host']} is {units.percent(1 - values[index] / usual, 0)} slower"
            for index in slow
        )
        fix = "leave it out (CUDA_VISIBLE_DEVICES, --exclude of SLURM); nvidia-smi -q shows its clocks, limits and errors"
        yield Check(name=name, status="problem", finding=f"{named}; {finding}", fix=fix)
    whole = [value for one in found if isinstance(value := one["all_reduce_bytes_per_second"], int | float)]
    if whole:
        nodes = len({one["host"] for one in found})
        finding = f"{min(whole) / 1e9:,.1f} GB/s over {len(whole)} ranks on {nodes} node{'' if nodes == 1 else 's'}"
        yield Check(name="all-reduce", status="ok", finding=finding)
    reported = {one["host"]: one["errors"] for one in found if one.get("errors") is not None}
    if errors := [f"{host}: {text}" for host, texts in reported.items() for text in texts]:
        fix = "nvidia-smi -q -d ECC,ROW_REMAPPER and sudo dmesg | grep Xid, there; reset the GPU, or leave it or its node out"
        yield Check(name="GPU errors", status="problem", finding="; ".join(errors), fix=fix)
    elif reported:
        yield Check(name="GPU errors", status="ok", finding=f"none reported by the driver on {', '.join(reported)}")
