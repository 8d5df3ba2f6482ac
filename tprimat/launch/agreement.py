"""Several nodes as one run: the launcher of the first node decides, those of the others start their ranks when it says so.

They agree through a store of torch that the first one opens at MASTER_ADDR:MASTER_PORT. It holds JSON documents, under the name
of the job: hello/RANK (who has taken place/RANK), orders (what all do now), ended/N/RANK (how its ranks of run N ended on a
node), and beat/RANK, which changes while a launcher lives.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any

from tprimat.core.errors import LaunchError
from tprimat.hardware.nodes import LOOPBACK, Nodes
from tprimat.launch.process import Ending, free_port
from tprimat.launch.rendezvous import open_listener
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Failure, NodeRecord
from tprimat.records.store import from_json, to_json

GONE = "gone"
"""In place of a beat: the launcher has ended."""
POLL_SECONDS = 0.1
CONNECT_SECONDS = 4.0
LOST_SECONDS = 15.0
"""Without a beat of a node, or without an answer of the first one."""
LEAVE_SECONDS = 5.0
"""For the other launchers to hear the last word before the store closes."""
FAILED_SECONDS = 5.0
"""After the ranks of one node have failed: for the others to fail by themselves, with a better message."""
PART_FAILED = "part_failed"
"""Kind of a failure whose cause is in the log of another node."""
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who joins."""

    node: NodeRecord
    software: dict[str, str]
    """Versions that must be the same on all nodes."""
    variables: dict[str, str] = field(default_factory=dict)
    """What tunes libraries there; it may differ, and is recorded where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the first node says."""

    number: int = 0
    """Of the run that all start, once it is a new one, counted from 1."""
    plan: RunPlan | None = None
    started_at: str | None = None
    place: Nodes = field(default_factory=Nodes)
    """With the address of torchrun's store; `rank` is the first node's."""
    stop: str | None = None
    leave: int | None = None
    error: tuple[str, str | None, str | None] | None = None
    """What keeps all from running together, why, and the way out."""


class LostNodeError(LaunchError):
    """A node is gone, so that no further run can start."""


class Store:
    """A store of torch with JSON documents of one job."""

    def __init__(self, nodes: Nodes, address: str, port: int, **options: Any) -> None:
        ours = LOG_LEVEL not in os.environ  # torch would write each broken connection to stderr with its C++ stack
        os.environ.setdefault(LOG_LEVEL, "ERROR")  # the first import reads it
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

        if ours:  # the ranks inherit the environment
            del os.environ[LOG_LEVEL]
        self._store = TCPStore(address, port, wait_for_workers=False, **options)
        self._job = f"{nodes.job}/{nodes.count}/"

    def read(self, key: str) -> bytes | None:
        """Return a document; None where there is none yet."""
        return self._store.get(self._job + key) if self._store.check([self._job + key]) else None

    def write(self, key: str, text: str) -> None:
        """Write a document."""
        self._store.set(self._job + key, text)

    def take(self, key: str) -> bool:
        """Take a place; False: somebody has it."""
        return bool(self._store.add(self._job + key, 1) == 1)


class NodeGroup:
    """All nodes of a run, as the first one sees them."""

    def __init__(self, nodes: Nodes, own: Hello, seconds: float) -> None:
        self.nodes = nodes
        self.status = 1
        """What all nodes exit with; the user of the group sets 0 when all went well."""
        self._seconds = seconds
        self._store, self._address = open_store(nodes)
        self._hellos = {0: own}
        self._orders = Orders()
        self._next = Orders()
        self._beats: dict[int, tuple[bytes, float]] = {}
        """The last one, and when it was new."""
        self._lost: dict[int, str] = {}
        self._ended: dict[int, Ending] = {}
        self._failed_at: float | None = None
        """When the ranks of another node had failed by themselves."""
        self._store.write("hello/0", to_json(own))

    def meet(self, check: Callable[[Sequence[Hello]], None]) -> None:
        """Wait until all others have joined. `check` raises a LaunchError for nodes that cannot run together."""
        ends = time.monotonic() + self._seconds
        try:
            while missing := set(range(1, self.nodes.count)) - self._hellos.keys():
                if time.monotonic() > ends:
                    names = ", ".join(map(self.nodes.name, sorted(missing))).capitalize()
                    raise LaunchError(
                        f"{names} of {self.nodes.count} did not join within {self._seconds:.0f} s.",
                        where=f"{self.nodes.master_address}:{self.nodes.master_port}",
                        why="Every node must start the same command, with a NODE_RANK of its own, and reach the first node.",
                        fix="start it on each, check MASTER_ADDR and firewalls, or raise benchmarking.meeting_timeout_seconds",
                    )
                time.sleep(POLL_SECONDS)
                for rank in missing:
                    if hello := self._store.read(f"hello/{rank}"):
                        self._hellos[rank] = from_json(Hello, hello, where="hello")
            check([self._hellos[rank] for rank in range(self.nodes.count)])
        except LaunchError as error:
            self.close(error)
            raise

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        """The nodes, each with the variables that it sets otherwise than the first one."""
        first, records = self._hellos[0].variables, []
        for hello in (self._hellos[rank] for rank in range(self.nodes.count)):
            here = hello.variables
            other = {name: here.get(name) for name in sorted({*here, *first}) if here.get(name) != first.get(name)}
            records.append(replace(hello.node, other_variables=other))
        return tuple(records)

    def prepare(self, plan: RunPlan, started_at: str | None) -> Nodes:
        """Return the first node's place in the next run, with a fresh port for torchrun's store."""
        address, port = self._address or self.nodes.master_address, free_port(self._address or "")
        place = replace(self.nodes, master_address=address, master_port=port)
        self._next = Orders(number=self._orders.number + 1, plan=plan, started_at=started_at, place=place)
        return place

    def begin(self) -> None:
        """Let the other nodes start their ranks of the run that was prepared."""
        self._poll()
        self._ended, self._failed_at = {}, None
        if self._lost:
            fix = "the same call with --resume continues from here"
            raise LostNodeError(f"{self._loss()} No further run can start.", fix=fix)
        self._say(self._next)

    def check(self) -> Failure | None:
        """Return why the run must end: a node is lost, or its ranks have failed and those of this node go on."""
        self._poll()
        if self._lost:
            hint = "look at that machine and at the scheduler's log; the same call with --resume repeats the run"
            return Failure(outcome="failed", cause=self._loss(), hint=hint, cut_off=True)
        if self._failed_at is not None and time.monotonic() - self._failed_at > FAILED_SECONDS:
            return Failure(outcome="failed", cause="The ranks of another node failed.", kind=PART_FAILED)
        return None

    def stop(self, cause: str) -> None:
        """Let the other nodes stop their ranks; a second call changes nothing."""
        if self._orders.stop is None:
            self._say(replace(self._orders, stop=cause))

    def finish(self, seconds: float) -> Failure | None:
        """Wait until the ranks of all nodes have ended; return which node was lost or late."""
        ends = time.monotonic() + seconds
        while (waiting := self._others() - self._ended.keys()) and time.monotonic() < ends:
            self._poll()
            time.sleep(POLL_SECONDS)
        self._lost |= dict.fromkeys(waiting, f"its ranks did not end within {seconds:.0f} s")
        return self.check() if self._lost else None

    def ends(self) -> dict[str, Ending]:
        """Return how the ranks of the other nodes ended, the first to end first: name of the node -> its end."""
        return {self._name(rank): ended for rank, ended in self._ended.items()}

    def close(self, error: LaunchError | None = None) -> None:
        """Let the other nodes go: with `status`, or with what keeps all of them from running together."""
        told = None if error is None else (error.what, error.why, error.fix)
        self._say(replace(self._orders, leave=self.status, error=told))
        ends = time.monotonic() + LEAVE_SECONDS
        while self._others() and time.monotonic() < ends:
            time.sleep(POLL_SECONDS)
            self._poll()
        del self._store  # closes it

    def _say(self, orders: Orders) -> None:
        self._orders = orders
        self._store.write("orders", to_json(orders))

    def _others(self) -> set[int]:
        return self._hellos.keys() - {0} - self._lost.keys()

    def _name(self, rank: int) -> str:
        return f"Node {rank} ({self._hellos[rank].node.host})"

    def _loss(self) -> str:
        rank, reason = next(iter(self._lost.items()))
        return f"{self._name(rank)} was lost: {reason}."

    def _poll(self) -> None:
        now = time.monotonic()
        for rank in sorted(self._others()):
            if rank not in self._ended and (text := self._store.read(f"ended/{self._orders.number}/{rank}")):
                ended = self._ended[rank] = from_json(Ending, text, where="ended")
                if (ended.exit_code or ended.stopped) and self._orders.stop is None:
                    self._failed_at = self._failed_at or now
            beat = self._store.read(f"beat/{rank}") or b""
            last, since = self._beats.get(rank, (b"", now))
            self._beats[rank] = beat, (since if beat == last else now)
            if beat == GONE.encode():
                self._lost[rank] = "its launcher ended"
            elif beat == last and now - since > LOST_SECONDS:
                self._lost[rank] = f"no sign of it for {now - since:.0f} s"


def open_store(nodes: Nodes) -> tuple[Store, str | None]:
    """Open the store of the first node, and return it with its IP address; None for all addresses.

    It listens on the address to which a name resolves here, unless that is a loopback which the others would not mean (Debian
    gives a machine's own name to 127.0.1.1), or no address of this machine: then on all. Raises LaunchError: the first node's
    name does not resolve, or the port is in use.
    """
    host, port = nodes.master_address or "", nodes.master_port or 0
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        what = f"The name of the first node, {host}, does not resolve on {socket.gethostname()}: {error.strerror}."
        raise LaunchError(what, where="MASTER_ADDR", fix="MASTER_ADDR with its IP address") from error
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
    store = Store(nodes, address if own else loopback, port, is_master=True, master_listen_fd=listener.detach())
    return store, address if own else None


class Member:
    """Another node's line to the first one. A thread talks, because asking a machine that is gone blocks."""

    def __init__(self, nodes: Nodes, own: Hello) -> None:
        self._nodes, self._own = nodes, own
        self._joined, self._leaving = Event(), Event()
        self._orders = Orders()
        self._said: tuple[str, str] | None = None
        self._problem = ""
        self._heard_at = time.monotonic()
        self._thread = Thread(target=self._work, name="first node", daemon=True)
        self._thread.start()

    def join(self, seconds: float, stopped: Callable[[], bool]) -> bool:
        """Wait for the first node. False: `stopped` has ended the wait."""
        ends, nodes = time.monotonic() + seconds, self._nodes
        while not self._joined.wait(POLL_SECONDS):
            if stopped():
                return False
            if time.monotonic() > ends:
                host, port, name = nodes.master_address or "", nodes.master_port, nodes.name(nodes.rank)
                here = f", and {host} is this machine itself" if host.startswith((*LOOPBACK, "localhost")) else ""
                what, why = f"The first node, {host}, did not answer on port {port}", f"This is {name} of {nodes.count}{here}."
                fix = "start the same command there with NODE_RANK=0, and open the port between the nodes"
                raise LaunchError(f"{what} within {seconds:.0f} s: {self._problem}.", where="MASTER_ADDR", why=why, fix=fix)
        return True

    def orders(self) -> Orders:
        """Return what the first node said last."""
        silence = time.monotonic() - self._heard_at
        if self._orders.leave is None and (self._problem or silence > LOST_SECONDS):
            raise LostNodeError(f"the first node was lost: {self._problem or f'no answer for {silence:.0f} s'}.")
        return self._orders

    def report(self, number: int, ended: Ending) -> None:
        """Tell the first node how the ranks of a run ended here."""
        self._said = f"ended/{number}/{self._nodes.rank}", to_json(ended)

    def close(self) -> None:
        """Tell the first node that this launcher ends."""
        self._leaving.set()
        self._thread.join(LEAVE_SECONDS)

    def _work(self) -> None:
        while not self._joined.is_set() and not self._leaving.wait(POLL_SECONDS):
            try:
                self._talk()
            except (OSError, RuntimeError) as error:  # torch's DistError is a RuntimeError
                lost = "its launcher ended" if self._joined.is_set() else str(error)
                self._problem = (error.strerror or lost).lower() if isinstance(error, OSError) else lost

    def _talk(self) -> None:
        place = self._nodes.master_address or "", self._nodes.master_port or 0
        with socket.create_connection(place, CONNECT_SECONDS) as connection:  # says why it fails, which torch does not
            address, port, *_ = connection.getpeername()
        self._problem = "the program that listens there is no launcher of this run"
        store, rank = Store(self._nodes, address, port), self._nodes.rank
        if store.read("hello/0") is None:
            return
        if not store.take(f"place/{rank}"):  # a second start would run beside the first one, and its end would end that
            self._problem = f"its node {rank} has already joined; every node needs its own NODE_RANK"
            return
        store.write(f"hello/{rank}", to_json(self._own))
        self._problem, self._heard_at = "", time.monotonic()
        self._joined.set()
        heard: bytes | None = None
        while not self._leaving.wait(POLL_SECONDS) or self._said:
            said, self._said = self._said, None
            if said is not None:
                store.write(*said)
            store.write(f"beat/{rank}", str(time.monotonic()))
            before, heard = heard, store.read("orders")
            if heard is not None and heard != before:
                self._orders = from_json(Orders, heard, where="orders")
            self._heard_at = time.monotonic()
        store.write(f"beat/{rank}", GONE)
