"""A run over several nodes: which nodes there are, and what the launchers of the nodes after the first one do."""

import contextlib
import dataclasses
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tprimat.core.accelerators import BACKEND_OF
from tprimat.core.errors import LaunchError, UserError
from tprimat.engines.base import Command, engine_named
from tprimat.hardware.nodes import Nodes, gpus_of_ranks, this_machine
from tprimat.hardware.sampler import Telemetry
from tprimat.launch.agreement import POLL_SECONDS, Ended, Group, Hello, LostError, Member, Order, Part
from tprimat.launch.collectives import RankRecord, take_records
from tprimat.launch.process import GRACE_SECONDS, Child, Interrupts, Output, Supervisor
from tprimat.launch.stacks import Stack, describe, take_stacks
from tprimat.launch.torchrun import torchrun
from tprimat.plan.schema import RunPlan, write_plan
from tprimat.records.environment import processor_name, software_versions, usable_cores, variables_of_run
from tprimat.records.schema import Failure, Machine, NodeRecord
from tprimat.records.store import RunDirectory

EQUAL_SOFTWARE = ("tprimat", "torch", "megatron-core")
"""Packages of one version on all nodes: ranks that disagree hang, or measure something else."""
TAIL_CHARACTERS = 200_000
"""Of a node's log, sent to the first node to find the cause of a failure."""
LOST = 1
"""Exit status of a node whose first node is gone."""

Notify = Callable[[str], None]


def node_record(machine: Machine | None, platform_is_cpu: bool) -> NodeRecord:
    """Return this machine as a node of a run."""
    host, processor, cores = socket.gethostname(), processor_name(), usable_cores()
    if machine is None or platform_is_cpu:
        accelerator = processor if platform_is_cpu else None
        return NodeRecord(host=host, accelerator=accelerator, gpus=None, processor=processor, cores=cores)
    return NodeRecord(
        host=host,
        accelerator=machine.accelerator,
        gpus=machine.gpus_per_node,
        memory_bytes=machine.memory_bytes,
        driver=machine.driver,
        processor=processor,
        cores=cores,
    )


def this_node(plan: RunPlan) -> NodeRecord:
    """Return this machine as a node of a plan's run."""
    return node_record(this_machine(), plan.platform == "cpu")


def hello_of(nodes: Nodes, plan: RunPlan) -> Hello:
    """Return what this node says of itself."""
    versions = software_versions()
    software = {name: versions.get(name, "none") for name in EQUAL_SOFTWARE}
    variables = variables_of_run(plan.environment)
    return Hello(rank=nodes.rank, count=nodes.count, job=nodes.job, software=software, node=this_node(plan), variables=variables)


# The first node.


@contextlib.contextmanager
def gathered(nodes: Nodes, plan: RunPlan, seconds: float, notify: Notify) -> Iterator[Group | None]:
    """Wait for the other nodes, and let them go at the end; None on one node.

    Raises:
        LaunchError: a node did not come, or does not fit.
    """
    if nodes.count == 1:
        yield None
        return
    notify(f"node 0 of {nodes.count} waits for the others, for at most {seconds:.0f} s")
    group = Group(nodes, hello_of(nodes, plan), seconds)
    group.meet(lambda records: refuse_unlike(records, plan))
    try:
        notify("nodes: " + ", ".join(node.host for node in group.records))
        yield group
    finally:
        group.close()


def refuse_unlike(found: Sequence[NodeRecord], plan: RunPlan) -> None:
    """Refuse nodes whose accelerators differ: the slowest would set the pace, and the result would have no name."""
    if plan.platform == "cpu":
        return
    kinds = {(node.accelerator, node.memory_bytes) for node in found}
    listed = "; ".join(f"{node.host}: {node.gpus or 'no'} x {node.accelerator or BACKEND_OF[plan.platform]}" for node in found)
    if len(kinds) > 1:
        raise LaunchError(
            f"The nodes have different accelerators: {listed}.",
            why="The slowest sets the pace, so the result would describe none of them.",
            fix="nodes of one kind; with SLURM, --constraint names it",
        )
    if any((node.gpus or 0) < plan.gpus_per_node for node in found):
        what = f"The plan needs {plan.gpus_per_node} GPUs on each node; there are {listed}."
        raise LaunchError(what, where="--gpus", fix="--gpus with a number that every node has")


# The other nodes.


def follow(nodes: Nodes, plan: RunPlan, seconds: float, notify: Notify) -> int:
    """Do this node's part of each run that the first node starts, until it has no more.

    Returns:
        the first node's exit status; 128 and the number of the signal that stopped this node.

    Raises:
        LaunchError: the first node does not answer, or refuses.
    """
    name = f"node {nodes.rank} of {nodes.count}"
    with Interrupts() as interrupts:
        member = Member(nodes, hello_of(nodes, plan))
        try:
            if member.join(seconds, lambda: interrupts.count > 0):
                notify(f"{name} follows {nodes.master_address}")
                return Follower(member, nodes, interrupts, lambda text: notify(f"{name}: {text}")).follow()
        except LostError as error:
            notify(f"{name}: the first node was lost: {error}.")
            return LOST
        finally:
            member.close()
    return 128 + (interrupts.first or signal.SIGINT)


class Follower:
    """This node's part of each run. What arrives meanwhile goes to the inbox, since the order to stop may follow at once."""

    def __init__(self, member: Member, nodes: Nodes, interrupts: Interrupts, notify: Notify) -> None:
        self._member = member
        self._inbox: deque[Order] = deque()
        self._nodes = nodes
        self._interrupts = interrupts
        self._notify = notify

    def follow(self) -> int:
        """Do what the first node says, until it has no more; return the exit status."""
        while not self._interrupts.count:
            self._inbox.extend(self._member.poll())
            while self._inbox:
                order = self._inbox.popleft()
                if order.error is not None:
                    what, why, fix = order.error
                    raise LaunchError(what, where="the first node", why=why, fix=fix)
                if order.leave is not None:
                    return order.leave
                if order.start is not None:
                    self._member.report(order.start.number, self._run(order.start))
            time.sleep(POLL_SECONDS)
        return 128 + (self._interrupts.first or signal.SIGINT)

    def _run(self, part: Part) -> Ended:
        """Start the ranks, stop them when the first node says so, and return how they ended."""
        try:
            return self._train(part)
        except UserError as error:
            self._notify(error.what)
            return Ended(exit_code=None, failure=Failure(outcome="failed", cause=error.what, hint=error.fix))

    def _train(self, part: Part) -> Ended:
        # One writer per folder: plan, log and telemetry of this node are in a folder of its own, on a shared disk or on its own.
        plan = dataclasses.replace(part.plan, run_directory=str(Path(part.plan.run_directory) / f"node-{self._nodes.rank}"))
        directory = RunDirectory(Path(plan.run_directory))
        write_plan(directory.plan_file, plan)
        address = part.store_address or self._nodes.master_address
        place = dataclasses.replace(self._nodes, master_address=address, master_port=part.store_port)
        output = Output((directory.log_file,), lambda _: None, self._notify)
        gpus = () if plan.platform == "cpu" else gpus_of_ranks(plan.gpus_per_node)
        stacks: list[Stack] = []
        collectives: list[RankRecord] = []
        began = time.monotonic()
        with Telemetry(directory, part.started_at, gpus, self._notify):
            child = Child(command_on(plan, place), GRACE_SECONDS)
            supervisor = Supervisor(child, output, GRACE_SECONDS, self._interrupts)

            def stop() -> Order | None:
                return next((order for order in self._inbox if order.stop is not None), None)

            def tick(now: float) -> Failure | None:
                self._inbox.extend(self._member.poll())
                order = stop()
                return None if order is None else Failure(outcome="interrupted", cause=order.stop or "")

            def before_stop(why: Failure, listen: Callable[[], str]) -> Failure:
                self._notify(f"{why.cause} Stopping it.")
                if (order := stop()) is not None and order.stacks:
                    collectives.extend(take_records(child.members(), directory.path))
                    stacks.extend(take_stacks(child.members(), listen))
                    self._save_stacks(directory.path / "stacks.txt", stacks)
                return why

            ending = supervisor.run(tick, before_stop)
        how = "stopped" if ending.stopped else "ended well" if ending.exit_code == 0 else f"ended with status {ending.exit_code}"
        self._notify(f"{plan.run_id} {how} after {time.monotonic() - began:.0f} s; its log is {directory.log_file}")
        return Ended(
            exit_code=ending.exit_code,
            failure=ending.stopped if stop() is None else None,
            lines=tail_of(list(output.tail)) if ending.exit_code != 0 else (),
            stacks=tuple(each for each in stacks if each.rank is not None),
            collectives=tuple(collectives),
        )

    def _save_stacks(self, path: Path, stacks: list[Stack]) -> None:
        try:
            path.write_text(describe(stacks), encoding="utf8")
        except OSError as error:
            self._notify(f"The stacks cannot be written to {path}: {error.strerror or error}.")


def command_on(plan: RunPlan, place: Nodes) -> Command:
    """Return the exact command that runs a plan on one of its nodes."""
    command = engine_named(plan.engine).command(plan)
    if command.ranks_per_node is None:
        return command
    prefix = torchrun(place, command.ranks_per_node)
    return dataclasses.replace(command, argv=(*prefix, *command.argv), ranks_per_node=None)


def tail_of(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last lines of a log, at most TAIL_CHARACTERS of them."""
    found: list[str] = []
    left = TAIL_CHARACTERS
    for line in reversed(lines):
        left -= len(line) + 1
        if left < 0:
            break
        found.append(re.sub(r"[\ud800-\udfff]", "?", line))
    return tuple(reversed(found))
