"""Describe this machine and its place among the nodes of a run.

Reads the environment variables SLURM_*, MASTER_ADDR, MASTER_PORT, NODE_RANK and *_VISIBLE_DEVICES.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tprimat.errors import LaunchError
from tprimat.hardware.gpus import Gpu, common, visible_gpus
from tprimat.records.schema import Machine

DEFAULT_PORT = 29500
"""The default of torch.distributed."""
BRACKETS = re.compile(r"([^,\[]*)\[([^\]]*)\]([^,\[]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of one run, seen from this one."""

    count: int = 1
    rank: int = 0
    """Of this node."""
    master_address: str | None = None
    """None on a single node, where torchrun needs no address."""
    master_port: int | None = None


def this_machine(environment: Mapping[str, str] = os.environ) -> Machine | None:
    """Describe the GPUs that a run started now would see, as one node; None if there are none.

    GPUs of different kinds have no common name: `accelerator` then lists all names, and no peak rate is known for it.
    """
    gpus = visible_gpus(environment)
    if not gpus:
        return None
    names = list(dict.fromkeys(gpu.name for gpu in gpus if gpu.name))
    return Machine(
        platform=gpus[0].platform,
        accelerator=" + ".join(names) or None,
        gpus_per_node=len(gpus),
        nodes=1,
        memory_bytes=min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None),
        power_limit_watts=common(gpu.power_limit_watts for gpu in gpus),
        driver=common(gpu.driver for gpu in gpus),
    )


def gpus_of_ranks(count: int, environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Return the GPUs that the ranks of a run use on this machine, in the order of their local ranks."""
    return visible_gpus(environment)[:count]


def find_nodes(count: int, environment: Mapping[str, str] = os.environ) -> Nodes:
    """Find this machine's place in a run on `count` nodes.

    Raises:
        LaunchError: neither SLURM nor MASTER_ADDR and NODE_RANK describe the nodes, or they contradict `count`.
    """
    if count == 1:
        return Nodes()
    if "SLURM_JOB_ID" in environment and "MASTER_ADDR" not in environment:
        return slurm_nodes(count, environment)
    missing = [name for name in ("MASTER_ADDR", "NODE_RANK") if name not in environment]
    if missing:
        raise LaunchError(
            f"A run on {count} nodes needs {' and '.join(missing)} in the environment.",
            why="each node must know the address of the first one and its own rank",
            fix=f"on every node: MASTER_ADDR=FIRST_NODE NODE_RANK=0..{count - 1} ./benchmark.py --nodes {count}",
        )
    rank = whole_number(environment, "NODE_RANK")
    if not 0 <= rank < count:
        raise LaunchError(f"NODE_RANK is {rank}, but a run on {count} nodes has ranks 0 to {count - 1}.")
    port = whole_number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else DEFAULT_PORT
    return Nodes(count=count, rank=rank, master_address=environment["MASTER_ADDR"], master_port=port)


def refuse_hidden_gpus(gpus: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a choice of GPUs that Primus would silently replace, since it sets HIP_VISIBLE_DEVICES to the first GPUs.

    Raises:
        LaunchError: HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES names other GPUs.
    """
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        indices = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        if indices and indices[:gpus] != [str(index) for index in range(gpus)]:
            raise LaunchError(
                f"{name} is {environment[name]}, which Primus would replace with the first {gpus} GPUs.",
                where=name,
                why="Its launchers set HIP_VISIBLE_DEVICES themselves.",
                fix=f"unset {name}; export ROCR_VISIBLE_DEVICES={environment[name]}",
            )


def slurm_nodes(count: int, environment: Mapping[str, str]) -> Nodes:
    """Read the variables that srun sets in each task."""
    fix = f"srun --nodes={count} --ntasks-per-node=1 ./benchmark.py --nodes {count}"
    given = whole_number(environment, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environment else "SLURM_NNODES")
    if given != count:
        raise LaunchError(f"SLURM started this on {given} nodes, but the run needs {count}.", fix=fix)
    if environment.get("SLURM_LOCALID", "0") != "0":
        raise LaunchError("SLURM started more than one task on this node, but torchrun starts the ranks itself.", fix=fix)
    hosts = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
    if not hosts:
        raise LaunchError("SLURM_JOB_NODELIST is empty.", fix=fix)
    # Every node must derive the same port on its own; jobs that share a node should get different ones.
    port = 20_000 + whole_number(environment, "SLURM_JOB_ID") % 10_000
    return Nodes(count=count, rank=whole_number(environment, "SLURM_NODEID"), master_address=hosts[0], master_port=port)


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand 'gpu[01-03,7],login' to node names, with scontrol or, where it is missing, for the common forms."""
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=10, check=True)
        return tuple(done.stdout.split())
    except (OSError, subprocess.SubprocessError):
        return tuple(name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in expand_brackets(part))


def expand_brackets(part: str) -> list[str]:
    """Expand one part of a host list.

    Raises:
        LaunchError: the brackets contain something other than numbers and ranges.
    """
    match = BRACKETS.search(part)
    if match is None:
        return [part]
    names = []
    for piece in match[2].split(","):
        low, _, high = piece.partition("-")
        if not (low.isdigit() and (high or low).isdigit()):
            raise LaunchError(f"Cannot parse the host list {part}.", fix="set MASTER_ADDR and NODE_RANK on every node")
        for value in range(int(low), int(high or low) + 1):
            names += expand_brackets(f"{match[1]}{value:0{len(low)}d}{match[3]}{part[match.end() :]}")
    return names


def whole_number(environment: Mapping[str, str], name: str) -> int:
    """Read an environment variable that must be a whole number.

    Raises:
        LaunchError: it is absent or something else.
    """
    text = environment.get(name)
    if text is None or not text.isdigit():
        raise LaunchError(f"The environment variable {name} is {text!r}, not a whole number.", where=name)
    return int(text)
