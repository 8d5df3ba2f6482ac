"""Where the ranks run: the GPUs of this machine, and the nodes that a scheduler or the user gives.

The one place of the launcher that reads the environment: SLURM_*, MASTER_ADDR, MASTER_PORT, NODE_RANK and *_VISIBLE_DEVICES.
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
"""torch.distributed's own."""
BRACKETS = re.compile(r"([^,\[]*)\[([^\]]*)\]([^,\[]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of one run, as this one sees them."""

    count: int = 1
    rank: int = 0
    """Of this machine."""
    master_address: str | None = None
    """None on a single node: the ranks meet on it."""
    master_port: int | None = None


def this_machine(environment: Mapping[str, str] = os.environ) -> Machine | None:
    """The GPUs that a run started now would see, as one node; None when there are none.

    GPUs of different kinds have no common name: `accelerator` then lists all of them, which no table of peaks knows.
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
    """The GPUs that the ranks of a run on this machine take, in the order of their local ranks."""
    return visible_gpus(environment)[:count]


def find_nodes(count: int, environment: Mapping[str, str] = os.environ) -> Nodes:
    """The place of this machine in a run on `count` nodes.

    Raises:
        LaunchError: neither SLURM nor MASTER_ADDR and NODE_RANK say where the others are, or they contradict `count`.
    """
    if count == 1:
        return Nodes()
    if "SLURM_JOB_ID" in environment and "MASTER_ADDR" not in environment:
        return slurm_nodes(count, environment)
    missing = [name for name in ("MASTER_ADDR", "NODE_RANK") if name not in environment]
    if missing:
        raise LaunchError(
            f"A run on {count} nodes needs {' and '.join(missing)} in the environment.",
            why="each node must know the first one, and its own number",
            fix=f"on every node: MASTER_ADDR=FIRST_NODE NODE_RANK=0..{count - 1} ./benchmark.py --nodes {count}",
        )
    rank = whole_number(environment, "NODE_RANK")
    if not 0 <= rank < count:
        raise LaunchError(f"NODE_RANK is {rank}, which a run on {count} nodes does not have.", fix=f"0 to {count - 1}")
    port = whole_number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else DEFAULT_PORT
    return Nodes(count=count, rank=rank, master_address=environment["MASTER_ADDR"], master_port=port)


def refuse_hidden_gpus(gpus: int, environment: Mapping[str, str] = os.environ) -> None:
    """Primus overwrites HIP_VISIBLE_DEVICES with the first GPUs: a user's choice of others would be lost without a word.

    Raises:
        LaunchError: there is such a choice.
    """
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        chosen = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        if chosen and chosen[:gpus] != [str(index) for index in range(gpus)]:
            raise LaunchError(
                f"{name} is {environment[name]}, which Primus would replace by the first {gpus} GPUs.",
                where=name,
                why="Its launchers set HIP_VISIBLE_DEVICES themselves.",
                fix=f"unset {name}; export ROCR_VISIBLE_DEVICES={environment[name]}",
            )


def slurm_nodes(count: int, environment: Mapping[str, str]) -> Nodes:
    """From the variables that srun sets in each task."""
    fix = f"srun --nodes={count} --ntasks-per-node=1 ./benchmark.py --nodes {count}"
    given = whole_number(environment, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environment else "SLURM_NNODES")
    if given != count:
        raise LaunchError(f"SLURM started this on {given} nodes, the run wants {count}.", fix=fix)
    if environment.get("SLURM_LOCALID", "0") != "0":
        raise LaunchError("SLURM started more than one of these on this node; torchrun starts the ranks itself.", fix=fix)
    hosts = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
    if not hosts:
        raise LaunchError("SLURM_JOB_NODELIST names no node.", fix=fix)
    # Every node must come to the same port without asking the others; jobs that share a node should differ.
    port = 20_000 + whole_number(environment, "SLURM_JOB_ID") % 10_000
    return Nodes(count=count, rank=whole_number(environment, "SLURM_NODEID"), master_address=hosts[0], master_port=port)


def expand_hosts(text: str) -> tuple[str, ...]:
    """'gpu[01-03,7],login' as its names. scontrol knows every form; without it the usual ones are understood."""
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=10, check=True)
        return tuple(done.stdout.split())
    except (OSError, subprocess.SubprocessError):
        return tuple(name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in expand_brackets(part))


def expand_brackets(part: str) -> list[str]:
    """The names that one part of a host list stands for.

    Raises:
        LaunchError: something else than numbers and ranges in the brackets.
    """
    match = BRACKETS.search(part)
    if match is None:
        return [part]
    names = []
    for piece in match[2].split(","):
        low, _, high = piece.partition("-")
        if not (low.isdigit() and (high or low).isdigit()):
            raise LaunchError(f"The host list {part} is not understood.", fix="set MASTER_ADDR and NODE_RANK on every node")
        for value in range(int(low), int(high or low) + 1):
            names += expand_brackets(f"{match[1]}{value:0{len(low)}d}{match[3]}{part[match.end() :]}")
    return names


def whole_number(environment: Mapping[str, str], name: str) -> int:
    """A variable that must be a number.

    Raises:
        LaunchError: it is absent or something else.
    """
    text = environment.get(name)
    if text is None or not text.isdigit():
        raise LaunchError(f"The environment variable {name} is {text!r}, not a whole number.", where=name)
    return int(text)
