"""Several nodes as one run: the launcher of the first node decides, those of the others start their ranks when it says so.

They agree through a store of torch that the first one opens at MASTER_ADDR:MASTER_PORT. It holds JSON documents:

    hello/RANK             who the launcher of a node is
    order/1, order/2, ...  what the others do next
    beat/RANK              counts up while a launcher lives
    ended/PART/RANK        how the ranks of a node ended
"""

import functools
import gc
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any

from tprimat.core.errors import LaunchError, UserError
from tprimat.hardware.nodes import LOOPBACK, Nodes
from tprimat.launch.collectives import RankRecord
from tprimat.launch.rendezvous import open_listener
from tprimat.launch.stacks import Stack
from tprimat.launch.torchrun import free_port
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Failure, NodeRecord
from tprimat.records.store import from_json, to_json

LEFT = b"left"
"""In place of a beat: the launcher ends."""
POLL_SECONDS = 0.1
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 4.0
LOST_SECONDS = 15.0
"""Without a beat of a node, or without an answer of the first one."""
LEAVE_SECONDS = 5.0
"""For the other launchers to hear the last order before the store closes."""
FAILED_PART_SECONDS = 5.0
"""After the ranks of one node have failed: for the others to fail by themselves, with a better message."""
PART_FAILED = "part_failed"
"""Kind of a failure whose cause is in the log of another node."""
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who connects."""

    rank: int
    count: int
    job: str | None
    software: dict[str, str]
    """Versions that must be the same on all nodes."""
    node: NodeRecord
    variables: dict[str, str] = field(default_factory=dict)
    """What tunes libraries there; it may differ, and is recorded where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A node's part of a run."""

    number: int
    plan: RunPlan
    started_at: str
    """Of the run, ISO 8601."""
    store_address: str | None
    """Where torchrun's store listens; None: at the address by which this node found the first one."""
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the first node says."""

    start: Part | None = None
    stop: str | None = None
    """Stop your ranks, for this cause."""
    stacks: bool = False
    """The run hangs: save the stacks of the processes first."""
    leave: int | None = None
    """Exit with this status."""
    error: tuple[str, str | None, str | None] | None = None
    """What went wrong, why, and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The ranks of a node have ended."""

    exit_code: int | None
    failure: Failure | None = None
    """Why they could not be started, or were stopped without an order, such as by a signal."""
    lines: tuple[str, ...] = ()
    """The end of the log."""
    stacks: tuple[Stack, ...] = ()
    """Where the ranks of a hung run stood."""
    collectives: tuple[RankRecord, ...] = ()
    """How far their collectives had come."""

    @property
    def failed(self) -> bool:
        """Whether this node's ranks did not do their part."""
        return bool(self.exit_code) or self.failure is not None


class LostError(Exception):
    """The first node is gone."""


class LostNodeError(LaunchError):
    """A node of the group is gone, so that no further run can start."""


@functools.cache
def store_type() -> Any:
    """Return torch's TCPStore, which would write each broken connection to stderr with the stack of its C++ calls."""
    chosen = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, "ERROR")  # the import reads it
    gc.disable()  # as in rendezvous.py
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

    gc.enable()
    if chosen is None:  # the ranks inherit the environment
        del os.environ[LOG_LEVEL]
    return TCPStore


# The first node.


class Group:
    """All nodes of a run, as the first one sees them."""

    def __init__(self, nodes: Nodes, own: Hello, seconds: float) -> None:
        """Open the store.

        Raises:
            LaunchError: the first node's name does not resolve, or the port is in use.
        """
        self.nodes = nodes
        self.status = 1
        """What all nodes exit with; the user of the group sets 0 when all went well."""
        self._own = own
        self._seconds = seconds
        self._store, self._address = open_store(nodes.master_address or "", nodes.master_port or 0, seconds)
        self._store.set("hello/0", to_json(own))
        self._hellos = {0: own}
        self._orders = self._parts = 0
        self._plan: RunPlan | None = None
        self._place = nodes
        self._beats: dict[int, tuple[bytes, float]] = {}
        """The last one, and when it was new."""
        self._lost: dict[int, str] = {}
        self._ended: dict[int, Ended] = {}
        self._first_failure: tuple[int, float] | None = None
        self._stopping = False

    def meet(self, check: Callable[[Sequence[NodeRecord]], None]) -> None:
        """Wait until all others have connected. `check` raises a LaunchError for nodes that cannot run together.

        Raises:
            LaunchError: a node did not come, or does not fit; the nodes that came know it too.
        """
        ends = time.monotonic() + self._seconds
        try:
            while len(self._hellos) < self.nodes.count:
                if time.monotonic() > ends:
                    raise self._missing()
                time.sleep(POLL_SECONDS)
                for rank in self._others():
                    if rank not in self._hellos and self._store.check([f"hello/{rank}"]):
                        self._hellos[rank] = from_json(Hello, self._store.get(f"hello/{rank}"), where="hello")
                        refuse_other_software(self._hellos[rank], self._own)
            check(self.records)
        except LaunchError as error:
            self._let_go(refusal(error))
            raise

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        """The nodes, each with the variables that it sets otherwise than the first one."""
        return tuple(with_variables(hello, self._own) for _, hello in sorted(self._hellos.items()))

    def name(self, rank: int) -> str:
        """Return 'node 1 (gpu07)'."""
        return f"node {rank} ({self._hellos[rank].node.host})"

    def prepare(self, plan: RunPlan) -> Nodes:
        """Return the first node's place in the next run, with a fresh port for torchrun's store."""
        address, port = self._address or self.nodes.master_address, free_port(self._address or "")
        self._plan, self._place = plan, replace(self.nodes, master_address=address, master_port=port)
        return self._place

    def begin(self, started_at: str) -> None:
        """Let the other nodes start their ranks of the run that was prepared.

        Raises:
            LostNodeError: a node was lost.
        """
        assert self._plan is not None  # `prepare` comes first
        self._parts += 1
        self._ended, self._first_failure, self._stopping = {}, None, False
        self._poll()
        if self._lost:
            fix = "the same call with --resume continues from here"
            raise LostNodeError(f"{self._loss()} No further run can start.", fix=fix)
        part = Part(
            number=self._parts,
            plan=self._plan,
            started_at=started_at,
            store_address=self._address,
            store_port=self._place.master_port or 0,
        )
        self._send(Order(start=part))

    def check(self, now: float) -> Failure | None:
        """Return why the run must end: a node is lost, or its ranks have failed and those of this node go on."""
        self._poll()
        if self._first_failure is not None:
            rank, at = self._first_failure
            ended, name = self._ended[rank], self.name(rank).capitalize()
            if ended.failure is not None:
                return replace(ended.failure, cause=f"{name}: {ended.failure.cause}")
            if now - at > FAILED_PART_SECONDS:
                cause = f"{name}: its ranks ended with status {ended.exit_code}."
                return Failure(outcome="failed", cause=cause, kind=PART_FAILED)
        if self._lost:
            hint = "look at that machine and at the scheduler's log; the same call with --resume repeats the run"
            return Failure(outcome="failed", cause=self._loss(), hint=hint, kind="lost_node", cut_off=True)
        return None

    def stop(self, cause: str, *, stacks: bool = False) -> None:
        """Let the other nodes stop their ranks; a second call changes nothing."""
        if not self._stopping:
            self._stopping = True
            self._send(Order(stop=cause, stacks=stacks))

    def finish(self, seconds: float) -> Failure | None:
        """Wait until the ranks of all nodes have ended.

        Returns:
            why the run did not end well elsewhere; None: all nodes did their part, or were stopped by this one.
        """
        ends = time.monotonic() + seconds
        while (waiting := self._others() - self._ended.keys() - self._lost.keys()) and time.monotonic() < ends:
            self._poll()
            time.sleep(POLL_SECONDS)
        if self._lost or self._first_failure is not None:
            return self.check(time.monotonic() + FAILED_PART_SECONDS)
        if waiting:
            names = ", ".join(map(self.name, sorted(waiting)))
            return Failure(outcome="failed", cause=f"The ranks of {names} did not end within {seconds:.0f} s.")
        return None

    def ends(self) -> list[tuple[NodeRecord, str, Ended]]:
        """Return how the ranks of the other nodes ended, the first to end first: the node, its name in words, and its end."""
        return [(self._hellos[rank].node, self.name(rank).capitalize(), ended) for rank, ended in self._ended.items()]

    def close(self) -> None:
        """Let the other nodes go, with `status`."""
        self._let_go(Order(leave=self.status))

    def _let_go(self, order: Order) -> None:
        self._send(order)
        ends = time.monotonic() + LEAVE_SECONDS
        while self._hellos.keys() - {0} - self._lost.keys() and time.monotonic() < ends:
            time.sleep(POLL_SECONDS)
            self._poll()
        self._store = None  # closes it

    def _others(self) -> set[int]:
        return set(range(1, self.nodes.count))

    def _loss(self) -> str:
        rank, reason = next(iter(self._lost.items()))
        return f"{self.name(rank).capitalize()} was lost: {reason}."

    def _send(self, order: Order) -> None:
        self._orders += 1
        self._store.set(f"order/{self._orders}", to_json(order))

    def _poll(self) -> None:
        ranks, now = sorted(self._hellos.keys() - {0} - self._lost.keys()), time.monotonic()
        beats = self._store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        for rank, beat in zip(ranks, beats, strict=True):
            last, since = self._beats.get(rank, (b"", now))
            self._beats[rank] = beat, (since if beat == last else now)
            key = f"ended/{self._parts}/{rank}"
            if rank not in self._ended and self._store.check([key]):
                self._ended[rank] = from_json(Ended, self._store.get(key), where=key)
                if self._ended[rank].failed and not self._stopping and self._first_failure is None:
                    self._first_failure = (rank, now)
            if beat == LEFT:
                self._lost[rank] = "its launcher ended"
            elif beat == last and now - since > LOST_SECONDS:
                self._lost[rank] = f"no sign of it for {now - since:.0f} s"

    def _missing(self) -> LaunchError:
        nodes = self.nodes
        names = [nodes.name(rank) for rank in range(nodes.count) if rank not in self._hellos]
        came = ", ".join(map(self.name, sorted(self._hellos.keys() - {0})))
        came = f"; {came} did" if came else ""
        return LaunchError(
            f"{', '.join(names).capitalize()} of {nodes.count} did not join within {self._seconds:.0f} s{came}.",
            where=f"{nodes.master_address}:{nodes.master_port}",
            why="Every node of a run starts the same command, and all of them reach the first one.",
            fix="start it on each (srun does), check MASTER_ADDR and firewalls, or raise benchmarking.meeting_timeout_seconds",
        )


def with_variables(hello: Hello, first: Hello) -> NodeRecord:
    """Return the record of a node with the variables that it sets otherwise than the first one."""
    names = sorted({*hello.variables, *first.variables})
    here, there = hello.variables, first.variables
    return replace(hello.node, other_variables={name: here.get(name) for name in names if here.get(name) != there.get(name)})


def refuse_other_software(hello: Hello, first: Hello) -> None:
    """Refuse a node whose ranks would be another program."""
    for name, version in first.software.items():
        if (other := hello.software.get(name, "none")) != version:
            raise LaunchError(
                f"The nodes have different software: {name} {version} on {first.node.host}, {other} on {hello.node.host}.",
                why="One run is one program.",
                fix="one environment on a shared disk, or one container image for all nodes",
            )


def refuse_other_run(hello: Hello, first: Hello, *, taken: bool) -> None:
    """Refuse to follow the first node of another run, or as a node that is there already."""
    if (hello.job, hello.count) != (first.job, first.count) or taken:
        has_come = f", and its node {hello.rank} has come" if taken else ""
        raise LaunchError(
            f"The run at this address is job {first.job or 'without a name'} on {first.count} nodes{has_come}.",
            why=f"This is node {hello.rank} of {hello.count} of job {hello.job or 'without a name'}.",
            fix="a different NODE_RANK for every node, and a different MASTER_PORT for every run",
        )


def refusal(error: LaunchError) -> Order:
    """Return the order to exit with an error."""
    return Order(leave=2, error=(error.what, error.why, error.fix))


def open_store(host: str, port: int, seconds: float) -> tuple[Any, str | None]:
    """Open the store of the first node.

    A name is listened on at the address to which it resolves here, unless that is a loopback which the others would not mean
    (Debian gives a machine's own name to 127.0.1.1), or no address of this machine: then on all.

    Returns:
        the store, and its IP address; None for all addresses.

    Raises:
        LaunchError: the name does not resolve, or the port is in use.
    """
    address = address_of(host, seconds)
    misleading = address.startswith(LOOPBACK) and host not in {address, "localhost"}
    everywhere, loopback = ("::", "::1") if ":" in address else ("0.0.0.0", "127.0.0.1")
    try:
        own = None if misleading else open_listener(address, port)
        listener = own or open_listener(everywhere, port)
    except OSError as error:
        what = f"Port {port} of {host} cannot be used: {(error.strerror or str(error)).lower()}."
        fix = "end the run that uses it, or set MASTER_PORT to another port on every node"
        raise LaunchError(what, where="MASTER_PORT", fix=fix) from error
    assert listener is not None  # all addresses can be listened on
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}  # the store closes it
    return store_type()(address if own else loopback, port, **options), address if own else None


def address_of(host: str, seconds: float) -> str:
    """Return the IP address of the first node; in a new pod its name may take a while to appear.

    Raises:
        LaunchError: the name does not resolve.
    """
    ends = time.monotonic() + seconds
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > ends:
                what = f"The name of the first node, {host}, does not resolve on {socket.gethostname()}: {error.strerror}."
                fix = "MASTER_ADDR with its IP address, or a line for it in /etc/hosts"
                raise LaunchError(what, where="MASTER_ADDR", fix=fix) from error
            time.sleep(RETRY_SECONDS)


# The other nodes.


class Member:
    """Another node's line to the first one: a thread shows that this launcher lives, and hears the orders."""

    def __init__(self, nodes: Nodes, own: Hello) -> None:
        """Begin to look for the first node."""
        self._joined = Event()
        self._nodes = nodes
        self._own = own
        self._orders: deque[Order] = deque()
        self._reports: deque[tuple[int, Ended]] = deque()
        self._problem: Exception | None = None
        self._heard_at = time.monotonic()
        self._leaving = Event()
        store_type()
        self._thread = Thread(target=self._work, name="first node", daemon=True)  # a machine that is gone blocks it
        self._thread.start()

    def poll(self) -> list[Order]:
        """Return the orders that have come, without waiting for more.

        Raises:
            LostError: the first node is gone.
        """
        problem, silence = self._problem, time.monotonic() - self._heard_at
        orders = [self._orders.popleft() for _ in range(len(self._orders))]
        if not orders and problem is not None:
            raise LostError("its launcher ended")
        if not orders and silence > LOST_SECONDS:
            raise LostError(f"no answer for {silence:.0f} s")
        return orders

    def report(self, part: int, ended: Ended) -> None:
        """Tell the first node how the ranks of a part have ended."""
        self._reports.append((part, ended))

    def close(self) -> None:
        """Tell the first node that this launcher ends."""
        self._leaving.set()
        self._thread.join(LEAVE_SECONDS)

    def join(self, seconds: float, stopped: Callable[[], bool]) -> bool:
        """Wait for the first node. False: `stopped` has ended the wait.

        Raises:
            LaunchError: it does not answer in time, or does another run.
        """
        ends = time.monotonic() + seconds
        while not self._joined.wait(POLL_SECONDS):
            if stopped():
                return False
            if isinstance(self._problem, LaunchError):
                raise self._problem
            if time.monotonic() > ends:
                raise self._unreachable(seconds)
        return True

    def _unreachable(self, seconds: float) -> LaunchError:
        host, port, error = self._nodes.master_address or "", self._nodes.master_port, self._problem
        address = address_of(host, 0)
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "what listens there is no launcher of this run"
        first = host if host == address else f"{host} ({address})"
        here = f", and {address} is this machine itself" if address.startswith(LOOPBACK) else ""
        return LaunchError(
            f"The first node, {first}, did not answer on port {port} within {seconds:.0f} s: {reason.lower()}.",
            where="MASTER_ADDR",
            why=f"This is {self._nodes.name(self._nodes.rank)} of {self._nodes.count}{here}.",
            fix="start the same command there with NODE_RANK=0, and open the port between the nodes",
        )

    def _work(self) -> None:
        while not self._leaving.is_set():
            try:
                self._talk()
            except (OSError, RuntimeError, UserError) as error:  # torch's DistError is a RuntimeError
                self._problem = error
                if self._joined.is_set() or isinstance(error, LaunchError):
                    return
                self._leaving.wait(RETRY_SECONDS)

    def _talk(self) -> None:
        place = self._nodes.master_address or "", self._nodes.master_port or 0
        with socket.create_connection(place, CONNECT_SECONDS) as connection:  # says why it fails, which torch does not
            address, port, *_ = connection.getpeername()
        self._problem = None
        store = store_type()(address, port, wait_for_workers=False)
        while not store.check(["hello/0"]):
            if self._leaving.wait(POLL_SECONDS):
                return
        first, rank = from_json(Hello, store.get("hello/0"), where="hello/0"), self._own.rank
        refuse_other_run(self._own, first, taken=False)
        refuse_other_run(self._own, first, taken=store.add(f"taken/{rank}", 1) > 1)
        store.add(f"beat/{rank}", 1)
        store.set(f"hello/{rank}", to_json(self._own))
        heard, self._heard_at = 0, time.monotonic()
        self._joined.set()
        while not self._leaving.wait(POLL_SECONDS) or self._reports:
            while self._reports:
                part, ended = self._reports.popleft()
                store.set(f"ended/{part}/{rank}", to_json(ended))
            store.add(f"beat/{rank}", 1)
            while store.check([f"order/{heard + 1}"]):
                heard += 1
                self._orders.append(from_json(Order, store.get(f"order/{heard}"), where="order"))
            self._heard_at = time.monotonic()
        store.set(f"beat/{rank}", LEFT.decode())
