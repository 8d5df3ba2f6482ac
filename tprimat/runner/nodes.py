"""A run over several nodes: which nodes there are, and what the launchers of the nodes after the first one do."""

import contextlib
import dataclasses
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tprimat.core.accelerators import BACKEND_OF
from tprimat.core.errors import LaunchError, UserError
from tprimat.hardware.gpus import telemetry
from tprimat.hardware.nodes import Nodes, gpus_of_ranks, this_machine
from tprimat.launch.agreement import POLL_SECONDS, Hello, LostNodeError, Member, NodeGroup, Orders
from tprimat.launch.process import Ending, Interrupts, Output, Supervisor, command_on
from tprimat.plan.schema import RunPlan, write_plan
from tprimat.records.environment import node_record, software_versions, variables_of_run
from tprimat.records.schema import Failure, NodeRecord
from tprimat.records.store import RunDirectory

EQUAL_SOFTWARE = ("tprimat", "torch", "megatron-core")
"""Packages of one version on all nodes: ranks that disagree hang, or measure something else."""
TAIL_CHARACTERS = 200_000
"""Of a node's log, sent to the first node to find the cause of a failure."""

Notify = Callable[[str], None]


def this_node(plan: RunPlan) -> NodeRecord:
    """Return this machine as a node of a plan's run."""
    machine = None if plan.platform == "cpu" else this_machine()
    node = node_record(machine, machine.gpus_per_node if machine else None)
    return dataclasses.replace(node, accelerator=node.processor) if plan.platform == "cpu" else node


def hello_of(plan: RunPlan) -> Hello:
    """Return what this node says of itself."""
    versions = software_versions()
    software = {name: versions.get(name, "none") for name in EQUAL_SOFTWARE}
    return Hello(node=this_node(plan), software=software, variables=variables_of_run(plan.environment))


@contextlib.contextmanager
def gathered(nodes: Nodes, plan: RunPlan, seconds: float, notify: Notify) -> Iterator[NodeGroup | None]:
    """Wait for the other nodes, and let them go at the end; None on one node."""
    if nodes.count == 1:
        yield None
        return
    notify(f"node 0 of {nodes.count} waits for the others, for at most {seconds:.0f} s")
    group = NodeGroup(nodes, hello_of(plan), seconds)
    group.meet(lambda hellos: refuse_unlike(hellos, plan))
    try:
        notify("nodes: " + ", ".join(node.host for node in group.records))
        yield group
    finally:
        group.close()


def refuse_unlike(hellos: Sequence[Hello], plan: RunPlan) -> None:
    """Refuse nodes whose programs or accelerators differ: the slowest would set the pace, and the result would have no name."""
    first = hellos[0]
    for hello in hellos:
        for name, version in first.software.items():
            if (other := hello.software.get(name, "none")) != version:
                raise LaunchError(
                    f"The nodes have different software: {name} {version} on {first.node.host}, {other} on {hello.node.host}.",
                    fix="one environment on a shared disk, or one container image for all nodes",
                )
    if plan.platform == "cpu":
        return
    nodes = [hello.node for hello in hellos]
    listed = "; ".join(f"{node.host}: {node.gpus or 'no'} x {node.accelerator or BACKEND_OF[plan.platform]}" for node in nodes)
    if len({(node.accelerator, node.memory_bytes) for node in nodes}) > 1:
        raise LaunchError(
            f"The nodes have different accelerators: {listed}.",
            why="The slowest sets the pace, so the result would describe none of them.",
            fix="nodes of one kind; with SLURM, --constraint names it",
        )
    if any((node.gpus or 0) < plan.gpus_per_node for node in nodes):
        what = f"The plan needs {plan.gpus_per_node} GPUs on each node; there are {listed}."
        raise LaunchError(what, where="--gpus", fix="--gpus with a number that every node has")


def follow(nodes: Nodes, plan: RunPlan, seconds: float, notify: Notify) -> int:
    """Do this node's part of each run that the first node starts, until it has no more.

    Return the first node's exit status; 1 if it was lost; 128 and the number of the signal that stopped this node.
    """
    name = f"node {nodes.rank} of {nodes.count}"
    with Interrupts() as interrupts:
        member = Member(nodes, hello_of(plan))
        try:
            if member.join(seconds, lambda: bool(interrupts.seen)):
                notify(f"{name} follows {nodes.master_address}")
            number = 0
            while not interrupts.seen:
                orders = member.orders()
                if orders.leave is not None:
                    if orders.error is None:
                        return orders.leave
                    what, why, fix = orders.error
                    raise LaunchError(what, where="the first node", why=why, fix=fix)
                if orders.plan is None or orders.number == number:
                    time.sleep(POLL_SECONDS)
                    continue
                number = orders.number
                # One writer per folder: this node's plan, log and telemetry have their own, on a shared disk or on its own.
                plan = dataclasses.replace(orders.plan, run_directory=f"{orders.plan.run_directory}/node-{nodes.rank}")
                here = dataclasses.replace(orders, place=dataclasses.replace(orders.place, rank=nodes.rank))
                member.report(number, follow_run(plan, here, member, interrupts, lambda text: notify(f"{name}: {text}")))
        except LostNodeError as error:
            notify(f"{name}: {error.what}")
            return 1
        finally:
            member.close()
    return 128 + (interrupts.first or signal.SIGINT)


def follow_run(plan: RunPlan, orders: Orders, member: Member, interrupts: Interrupts, notify: Notify) -> Ending:
    """Start the ranks of a run on this node, stop them when the first node says so, and return how they ended."""
    directory = RunDirectory(Path(plan.run_directory))
    began = time.monotonic()
    gpus = () if plan.platform == "cpu" else gpus_of_ranks(plan.gpus_per_node)

    def tick(now: float) -> Failure | None:
        cause = member.orders().stop
        return None if cause is None else Failure(outcome="interrupted", cause=cause)

    try:
        write_plan(directory.plan_file, plan)
        output = Output((directory.log_file,), lambda _: None, notify)
        with telemetry(directory, orders.started_at, gpus, notify):
            ending = Supervisor(command_on(plan, orders.place), output, interrupts, folder=directory.path).run(tick)
    except LostNodeError:
        raise
    except UserError as error:
        notify(error.what)
        return Ending(exit_code=None, stopped=Failure(outcome="failed", cause=error.what, hint=error.fix))
    how = "stopped" if ending.stopped else "ended well" if ending.exit_code == 0 else f"ended with status {ending.exit_code}"
    notify(f"{plan.run_id} {how} after {time.monotonic() - began:.0f} s; its log is {directory.log_file}")
    text = "\n".join(output.tail)[-TAIL_CHARACTERS:] if ending.exit_code != 0 else ""
    return dataclasses.replace(
        ending,
        stopped=ending.stopped if member.orders().stop is None else None,
        lines=tuple(re.sub(r"[\ud800-\udfff]", "?", text).split("\n")),
    )
