"""Describe this machine and its place among the nodes of a run.

Reads what srun, Kubernetes and people set: SLURM_*, PET_*, MASTER_ADDR, MASTER_PORT, NODE_RANK, NNODES, JOB_COMPLETION_INDEX, and
*_VISIBLE_DEVICES.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from math import prod

from tprimat.core.accelerators import recorded_name
from tprimat.core.errors import LaunchError
from tprimat.hardware.gpus import Gpu, visible_gpus
from tprimat.records.schema import Machine

DEFAULT_PORT = 29500
LAST_PORT = 65_535
RANKS_PER_CORE = 8
ALWAYS_RANKS = 8
"""As many as config.yaml starts, on any machine."""
INTERACTIVE_STEP = str(0xFFFFFFFA)
"""Of the shell that salloc opens on the first node of an allocation (LaunchParameters=use_interactive_step)."""
MOST_NODES = 100_000
LONGEST_HOST = 253


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of one run, seen from this one."""

    count: int = 1
    rank: int = 0
    """Of this node."""
    master_address: str | None = None
    """None on a single node, where torchrun needs no address."""
    master_port: int | None = None
    job: str | None = None
    """What the scheduler calls this start of the command, the same on every node; None if unknown."""
    hosts: tuple[str, ...] = ()
    """Names of all nodes in the order of their ranks, where the scheduler knows them."""

    def name(self, rank: int) -> str:
        """Return 'node 1', with its host where that is known."""
        return f"node {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"node {rank}"


def this_machine(environment: Mapping[str, str] = os.environ) -> Machine | None:
    """Describe the GPUs that a run started now would see, as one node; None if there are none.

    GPUs of different kinds have no common name: `accelerator` then lists all names, and no peak rate is known for it.
    """
    gpus = visible_gpus(environment)
    if not gpus:
        return None
    names = list(dict.fromkeys(recorded_name(gpu.name, gpu.memory_bytes) for gpu in gpus if gpu.name))
    return Machine(
        platform=gpus[0].platform,
        accelerator=" + ".join(names) or None,
        gpus_per_node=len(gpus),
        nodes=1,
        memory_bytes=min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None),
        power_limit_watts=gpus[0].power_limit_watts if len({gpu.power_limit_watts for gpu in gpus}) == 1 else None,
        driver=gpus[0].driver,  # one for all
    )


def gpus_of_ranks(count: int, environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Return the GPUs that the ranks of a run use on this machine, in the order of their local ranks."""
    return visible_gpus(environment)[:count]


def cpu_cores() -> int:
    """Return the cores of this machine."""
    return os.cpu_count() or 1


def most_cpu_ranks() -> int:
    """Return how many ranks may start on this machine's CPU; more only wait for each other."""
    return max(ALWAYS_RANKS, RANKS_PER_CORE * cpu_cores())


def told_nodes(environment: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """Return the number of nodes on which the scheduler started this command, and the variable that says so; None if unknown."""
    names = ["SLURM_STEP_NUM_NODES"] if in_slurm_step(environment) else ["PET_NNODES"]  # Kubeflow writes torchrun's variables
    names += ["NNODES"] if "MASTER_ADDR" in environment else []
    name = next((name for name in names if name in environment), None)
    return None if name is None else (whole_number(environment, name), name)


def find_nodes(count: int, environment: Mapping[str, str] = os.environ) -> Nodes:
    """Find this machine's place in a run on `count` nodes."""
    refuse_ranks(environment)
    told, nodes = told_nodes(environment), f"{count} node{'s' * (count > 1)}"
    if told is not None and told[0] != count:
        why = "Each process that the scheduler started would start its own run."
        fix = f"--nodes {told[0]}, or start the command on {nodes}; unset {told[1]} if it is left over"
        raise LaunchError(f"{told[1]} is {told[0]}, but the run is on {nodes}.", where=told[1], why=why, fix=fix)
    if count == 1:
        return Nodes()
    if "SLURM_JOB_ID" in environment and not {"MASTER_ADDR", "PET_MASTER_ADDR"} & set(environment):
        return slurm_nodes(count, environment)
    return described_nodes(count, environment)


def refuse_ranks(environment: Mapping[str, str]) -> None:
    """Refuse a start as one of several processes of a node: torchrun starts the ranks itself."""
    why = "TPrimat starts torchrun once on each node, and torchrun starts the ranks."
    if "TORCHELASTIC_RUN_ID" in environment or (environment.get("WORLD_SIZE", "1") != "1" and "LOCAL_RANK" in environment):
        fix = (
            "start it once on each node, without torchrun; if they are left over in this shell: unset RANK LOCAL_RANK WORLD_SIZE"
        )
        raise LaunchError("This is one of several ranks.", where="LOCAL_RANK and WORLD_SIZE", why=why, fix=fix)
    if in_slurm_step(environment):
        tasks, nodes = (whole_number(environment, f"SLURM_STEP_NUM_{what}") for what in ("TASKS", "NODES"))
        if tasks > nodes:
            what = f"srun started {tasks} tasks on {nodes} node{'s' * (nodes > 1)}."
            fix = f"srun --nodes={nodes} --ntasks={nodes} ..."
            raise LaunchError(what, where="SLURM_STEP_NUM_TASKS", why=why, fix=fix)


def refuse_idle_nodes(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a run on one node of a job of SLURM that has several, where nobody asked for one node: srun was forgotten."""
    given = environment.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" in environment and not in_slurm_step(environment) and given not in {"", "1"}:
        what = f"srun did not start this: it would run on one node of the {given} in the job."
        fix = f"srun --nodes={given} --ntasks={given} ./benchmark.py, or --nodes 1 for this node alone"
        raise LaunchError(what, where="SLURM_JOB_NUM_NODES", why="The other nodes would never start.", fix=fix)


def in_slurm_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process, rather than sbatch or a person in an allocation, whose shell may be a step."""
    names = {"SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"}
    return names <= set(environment) and environment.get("SLURM_STEP_ID") != INTERACTIVE_STEP


LOOPBACK = ("127.", "::1")
ADDRESSES = ("MASTER_ADDR", "PET_MASTER_ADDR")
PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
RANKS = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""This node's rank. The first that is set decides; an indexed Job of Kubernetes sets JOB_COMPLETION_INDEX."""
JOBS = ("PET_RDZV_ID", "SLURM_JOB_ID")


def described_nodes(count: int, environment: Mapping[str, str]) -> Nodes:
    """Read the address of the first node and this node's rank."""
    address, port, rank_name, job = (
        next((name for name in names if environment.get(name)), None) for names in (ADDRESSES, PORTS, RANKS, JOBS)
    )
    if address is None or rank_name is None:
        missing = [name for name, value in (("MASTER_ADDR", address), ("NODE_RANK", rank_name)) if value is None]
        what = f"A run on {count} nodes needs {' and '.join(missing)} in the environment."
        why = "Each node must know the address of the first one and its own rank."
        fix = f"on every node: MASTER_ADDR=FIRST_NODE NODE_RANK=0..{count - 1}, and the same command"
        raise LaunchError(what, why=why, fix=fix)
    if len(environment[address]) > LONGEST_HOST:
        raise LaunchError(f"{address} is {environment[address][:40]}..., which is not a host name.", where=address)
    rank = whole_number(environment, rank_name)
    if not 0 <= rank < count:
        raise LaunchError(f"{rank_name} is {rank}, but a run on {count} nodes has ranks 0 to {count - 1}.", where=rank_name)
    return Nodes(
        count=count,
        rank=rank,
        master_address=environment[address],
        master_port=DEFAULT_PORT if port is None else whole_number(environment, port, LAST_PORT),
        job=None if job is None else environment[job],
    )


def slurm_nodes(count: int, environment: Mapping[str, str]) -> Nodes:
    """Read the variables that srun sets in each task."""
    if not in_slurm_step(environment):
        given = environment.get("SLURM_NNODES", "1")
        what = f"srun did not start this: it runs on one node of the {given} in the job, but the run is on {count}."
        fix = f"srun --nodes={count} --ntasks={count} ./benchmark.py --nodes {count}"
        raise LaunchError(what, where="SLURM_JOB_ID", why="The other nodes would never start.", fix=fix)
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    if len(hosts) != count:
        what = f"SLURM_STEP_NODELIST names {len(hosts)} hosts, but the run is on {count} nodes."
        raise LaunchError(what, where="SLURM_STEP_NODELIST", fix="set MASTER_ADDR and NODE_RANK on every node")
    job, step = whole_number(environment, "SLURM_JOB_ID"), environment.get("SLURM_STEP_ID", "0")
    # Every node must derive the same port on its own; jobs, and steps of a job, that share a node should get different ones.
    port = 20_000 + (job + 97 * (int(step) if step.isdigit() else 0)) % 10_000
    if environment.get("MASTER_PORT"):
        port = whole_number(environment, "MASTER_PORT", LAST_PORT)
    rank = whole_number(environment, "SLURM_NODEID")
    return Nodes(count=count, rank=rank, master_address=hosts[0], master_port=port, job=f"{job}.{step}", hosts=hosts)


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand 'gpu[01-03,7],login' to node names; scontrol is missing in containers."""
    names: list[str] = []
    try:
        for word in re.findall(r"(?:\[[^\[\]]*\]|[^\[\],])+|[\[\]]", text):
            if word in "[]":
                raise ValueError
            pieces = re.split(r"\[(.*?)\]", word)  # every second one stood in brackets
            parts = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
            if prod(map(len, parts)) + len(names) > MOST_NODES:
                raise ValueError
            names += map("".join, product(*parts))
    except ValueError as error:
        fix = "set MASTER_ADDR and NODE_RANK on every node"
        raise LaunchError(f"Cannot parse the host list {text[:80]}.", fix=fix) from error
    return tuple(names)


def _numbers(text: str) -> list[str]:
    """Expand '01-03,7' to its numbers."""
    numbers: list[str] = []
    for low, _, high in (one.partition("-") for one in text.split(",")):
        if not low.isdecimal() or len(high) > len(str(MOST_NODES)) or len(numbers) > MOST_NODES:
            raise ValueError
        numbers += [f"{value:0{len(low)}d}" for value in range(int(low), int(high or low) + 1)]
    return numbers


def whole_number(environment: Mapping[str, str], name: str, most: int | None = None) -> int:
    """Read an environment variable that must be a whole number."""
    text = environment.get(name)
    if text is None or not text.isdigit() or (most is not None and not 0 < int(text) <= most):
        limits = "" if most is None else f" from 1 to {most}"
        raise LaunchError(f"The environment variable {name} is {text!r}, not a whole number{limits}.", where=name)
    return int(text)


def job_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the scheduler's name of this job, such as slurm 4711, or slurm 4711_3 for a task of an array; None outside one."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"slurm {environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    return f"slurm {environment['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environment else None


QUERY_SECONDS = 3.0
"""For an answer while a job ends; SLURM kills it 30 s after its first signal."""


def job_ends_at(known: float | None = None, environment: Mapping[str, str] = os.environ) -> float | None:
    """Return when this job's time limit is, in seconds since 1970; None: no job of SLURM, or no limit.

    `known` is what this returned before: a job that is cancelled ends now, so what counts is the limit that it had before.
    """
    job = environment.get("SLURM_JOB_ID", "")
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %e"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True) if job else None
        state, now = done.stdout.split() if done else ("", "")
        return datetime.fromisoformat(now).timestamp() if state == "RUNNING" else known  # in local time, without a zone
    except (OSError, subprocess.SubprocessError, ValueError):  # no squeue here, or no limit
        end = environment.get("SLURM_JOB_END_TIME", "")  # since SLURM 23.02
        return float(end) if known is None and end.isdigit() else known
