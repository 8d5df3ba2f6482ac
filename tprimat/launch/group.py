"""Several nodes as one run: the launcher of the first node decides, those of the others start their ranks when it says so.

    first node                             other nodes
    listens on MASTER_ADDR:MASTER_PORT     connect, and say who they are: Hello
    waits for all, or sends Refused        wait; everything below happens once for each run
    sends Part: the plan, and where        start their ranks on the plan
    the ranks meet
    sends Stop when the run must end       stop their ranks
    waits for all                          send Ended: how their ranks ended, with the end of their log
    sends Goodbye after the last run       exit with its status

Messages are JSON documents, one per line; nothing is pickled. The kernel's keep-alive probes notice a machine that is gone. A
suspended launcher counts as alive, since its kernel answers them.
"""

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from tprimat.core.errors import LaunchError
from tprimat.hardware.nodes import Nodes
from tprimat.launch.collectives import RankRecord
from tprimat.launch.stacks import Stack
from tprimat.launch.torchrun import free_port
from tprimat.logs.failures import Failure
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import MicroBatchTrial, NodeRecord
from tprimat.records.store import RunDirectory

LONGEST_MESSAGE_BYTES = 16 * 2**20
LONGEST_HELLO_BYTES = 2**16
"""Of a connection that has not said who it is."""
SEND_SECONDS = 10.0
POLL_SECONDS = 0.1
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 4.0
"""For one attempt to reach the first node: several packets, and soon enough to notice a signal."""
ALIVE_AFTER_SECONDS, ALIVE_EVERY_SECONDS, ALIVE_PROBES = 5, 3, 4
"""Keep-alive: a machine that answers nothing counts as lost after 17 s."""
FAILED_PART_SECONDS = 5.0
"""After the ranks of one node have failed: for the others to fail by themselves, with a better message."""
BACKLOG = 4096
PART_FAILED = "part_failed"
"""Kind of a failure whose cause is in the log of another node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who connects."""

    kind: Literal["hello"] = "hello"
    rank: int
    count: int
    job: str | None
    software: dict[str, str]
    """Versions that must be the same on all nodes."""
    node: NodeRecord
    variables: dict[str, str] = field(default_factory=dict)
    """What tunes libraries there; it may differ, and is recorded where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The first node does not start: why, for the user."""

    kind: Literal["refused"] = "refused"
    what: str
    why: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Start your ranks of a run."""

    kind: Literal["part"] = "part"
    number: int
    """Counts the starts of a group."""
    plan: RunPlan
    trials: tuple[MicroBatchTrial, ...] = ()
    """What earlier attempts of a search for the micro-batch found: all ranks must go on from the same."""
    started_at: str
    """Of the run, ISO 8601."""
    store_address: str | None
    """Where torchrun's store listens; None: at the address by which this node found the first one."""
    store_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Stop your ranks."""

    kind: Literal["stop"] = "stop"
    cause: str
    stacks: bool
    """The run hangs: save the stacks of the processes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The ranks of a node have ended."""

    kind: Literal["ended"] = "ended"
    number: int
    """Of the part."""
    exit_code: int | None
    stopped: str | None = None
    """Why this node stopped its ranks of its own accord, such as a signal; None: it did not."""
    error: str | None = None
    """Why they could not be started."""
    hint: str | None = None
    """What to try then."""
    lines: tuple[str, ...] = ()
    """The end of the log."""
    stacks: tuple[Stack, ...] = ()
    """Where the ranks of a hung run stood."""
    collectives: tuple[RankRecord, ...] = ()
    """How far their collectives had come."""

    @property
    def failed(self) -> bool:
        """Whether this node's ranks did not do their part."""
        return bool(self.exit_code) or self.stopped is not None or self.error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The last run has ended."""

    kind: Literal["goodbye"] = "goodbye"
    status: int
    """Exit with this."""


Message = Hello | Refused | Part | Stop | Ended | Goodbye
_messages: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


class LostError(Exception):
    """The other end of a link is gone, or talks nonsense."""


class LostNodeError(LaunchError):
    """A node of the group is gone, so that no further run can start."""


class Link:
    """A connection that carries messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = b""
        connection.settimeout(SEND_SECONDS)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, ALIVE_AFTER_SECONDS),
            (socket.TCP_KEEPINTVL, ALIVE_EVERY_SECONDS),
            (socket.TCP_KEEPCNT, ALIVE_PROBES),
            (socket.TCP_USER_TIMEOUT, 1000 * (ALIVE_AFTER_SECONDS + ALIVE_EVERY_SECONDS * ALIVE_PROBES)),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LostError: the other end is gone.
        """
        try:
            self._socket.sendall(_messages.dump_json(message) + b"\n")
        except OSError as error:
            raise LostError(reason_of(error)) from error

    def poll(self, longest: int = LONGEST_MESSAGE_BYTES) -> list[Message]:
        """Return the messages that have arrived, without waiting for more.

        Raises:
            LostError: the other end is gone, or sent something else.
        """
        found: list[Message] = []
        while self._readable():
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                raise LostError(reason_of(error)) from error
            if not data:
                if found:
                    return found
                raise LostError("its launcher ended")
            *lines, self._pending = (self._pending + data).split(b"\n")
            if len(self._pending) > longest:
                raise LostError("it sent a message without an end")
            found += map(_parse, lines)
        return found

    def _readable(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _parse(line: bytes) -> Message:
    try:
        return _messages.validate_json(line)
    except ValidationError as error:
        raise LostError("it does not speak this version of TPrimat") from error


def reason_of(error: OSError) -> str:
    """Return why a connection broke, in words."""
    if isinstance(error, TimeoutError) or error.errno in {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}:
        return "the machine does not answer"
    return f"the connection broke: {(error.strerror or str(error)).lower()}"


# The first node.


class Group:
    """All nodes of a run, as the first one sees them."""

    def __init__(self, nodes: Nodes, own: Hello, links: dict[int, Link], hellos: dict[int, Hello], address: str | None) -> None:
        """Take a complete group; `meet` makes one. `address` is where the first node listens; None: on all of its addresses."""
        self.nodes = nodes
        self.records = tuple(_with_variables(hello, own) for _, hello in sorted({**hellos, nodes.rank: own}.items()))
        self.status = 1
        """What all nodes exit with; the user of the group sets 0 when all went well."""
        self._links = links
        self._address = address
        self._lost: dict[int, str] = {}
        self._ended: dict[int, Ended] = {}
        self._first_failure: tuple[int, float] | None = None
        self._stopping = False
        self._number = 0
        """Of the present start: what a node reports late of an earlier one is not taken for it."""

    def name(self, rank: int) -> str:
        """Return 'node 1 (gpu07)'."""
        return f"node {rank} ({self.records[rank].host})"

    def place(self) -> Nodes:
        """Return the first node's place with a fresh port for torchrun's store."""
        port = free_port(self._address or "")
        return replace(self.nodes, master_address=self._address or self.nodes.master_address, master_port=port)

    def begin(self, plan: RunPlan, started_at: str, place: Nodes) -> None:
        """Let the other nodes start their ranks.

        Raises:
            LostNodeError: a node was lost.
        """
        self._ended, self._first_failure, self._stopping = {}, None, False
        assert place.master_port is not None  # `place` found one
        trials = RunDirectory(Path(plan.run_directory)).read_trials()
        address, port = self._address, place.master_port
        self._number += 1
        part = Part(number=self._number, plan=plan, trials=trials, started_at=started_at, store_address=address, store_port=port)
        self._send(part)
        self._poll()
        if self._lost:
            raise LostNodeError(
                f"{self._loss()} No further run can start.", fix="the same call with --resume continues from here"
            )

    def check(self, now: float) -> Failure | None:
        """Return why the run must end: a node is lost, or its ranks have failed and those of this node go on."""
        self._poll()
        if self._first_failure is not None:
            rank, at = self._first_failure
            failure = self.failure_of(rank)
            if failure.kind != PART_FAILED or now - at > FAILED_PART_SECONDS:
                return failure
        if self._lost:
            hint = "look at that machine and at the scheduler's log; the same call with --resume repeats the run"
            return Failure(outcome="failed", cause=self._loss(), hint=hint, kind="lost_node", cut_off=True)
        return None

    def failure_of(self, rank: int) -> Failure:
        """Describe how the ranks of a node failed, as far as their exit shows it."""
        ended, name = self._ended[rank], self.name(rank).capitalize()
        if ended.stopped is not None:
            return Failure(outcome="interrupted", cause=f"{name}: {ended.stopped}")
        if ended.error is not None:
            return Failure(outcome="failed", cause=f"{name}: {ended.error}", hint=ended.hint)
        return Failure(outcome="failed", cause=f"{name}: its ranks ended with status {ended.exit_code}.", kind=PART_FAILED)

    def failed_parts(self) -> list[tuple[str, Ended]]:
        """Return name and end of each other node whose ranks failed, of their own accord or not, the first one first."""
        failed = [rank for rank, ended in self._ended.items() if ended.failed]
        return [(self.name(rank).capitalize(), self._ended[rank]) for rank in failed]

    def stood(self) -> tuple[list[Stack], list[RankRecord]]:
        """Return where the ranks of the other nodes stood when a hung run was stopped."""
        ends = sorted(self._ended.items())
        stacks = [replace(each, node=self.records[rank].host) for rank, ended in ends for each in ended.stacks]
        return stacks, [each for _, ended in ends for each in ended.collectives]

    def stop(self, cause: str, *, stacks: bool = False) -> None:
        """Let the other nodes stop their ranks; a second call changes nothing."""
        if not self._stopping:
            self._stopping = True
            self._send(Stop(cause=cause, stacks=stacks))

    def finish(self, seconds: float) -> Failure | None:
        """Wait until the ranks of all nodes have ended.

        Returns:
            why the run did not end well elsewhere; None: all nodes did their part, or were stopped by this one.
        """
        ends = time.monotonic() + seconds
        while (waiting := self._running()) and time.monotonic() < ends:
            self._poll()
            time.sleep(POLL_SECONDS)
        if self._lost or self._first_failure is not None:
            return self.check(time.monotonic() + FAILED_PART_SECONDS)
        if waiting:
            names = ", ".join(map(self.name, waiting))
            return Failure(outcome="failed", cause=f"The ranks of {names} did not end within {seconds:.0f} s.")
        return None

    def close(self) -> None:
        """Let the other nodes go, with `status`."""
        self._send(Goodbye(status=self.status))
        for link in self._links.values():
            link.close()

    def _running(self) -> list[int]:
        return [rank for rank in self._links if rank not in self._ended and rank not in self._lost]

    def _loss(self) -> str:
        rank, reason = next(iter(self._lost.items()))
        return f"{self.name(rank).capitalize()} was lost: {reason}."

    def _send(self, message: Message) -> None:
        for rank, link in self._links.items():
            if rank not in self._lost:
                try:
                    link.send(message)
                except LostError as error:
                    self._lost[rank] = str(error)

    def _poll(self) -> None:
        for rank, link in self._links.items():
            if rank in self._lost:
                continue
            try:
                messages = link.poll()
            except LostError as error:
                self._lost[rank] = str(error)
                continue
            for message in messages:
                if isinstance(message, Ended) and message.number == self._number:
                    self._ended[rank] = message
                    if message.failed and not self._stopping and self._first_failure is None:
                        self._first_failure = (rank, time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """One run of all nodes, for the launcher of the first one."""

    group: Group
    plan: RunPlan
    place: Nodes
    """Where torchrun's store of this run listens."""


def meet(
    nodes: Nodes,
    own: Hello,
    seconds: float,
    check: Callable[[Sequence[NodeRecord]], None],
    watch: Callable[[], None] = lambda: None,
) -> Group:
    """Wait on the first node until all others have connected.

    `check` raises a LaunchError for nodes that cannot run together, `watch` for one that cannot come any more.

    Raises:
        LaunchError: a node did not come, or does not fit; the nodes that came know it too.
    """
    listener, address = listen(nodes, seconds)
    links: dict[int, Link] = {}
    hellos: dict[int, Hello] = {}
    unknown: list[Link] = []
    ends = time.monotonic() + seconds
    try:
        with listener:
            while len(links) + 1 < nodes.count:
                if time.monotonic() > ends:
                    raise _missing(nodes, hellos, seconds)
                watch()
                unknown += accept(listener)
                for link in list(unknown):
                    hello = _hello_of(link, unknown)
                    if hello is not None and _fits(hello, own, link, hellos):
                        links[hello.rank], hellos[hello.rank] = link, hello
        group = Group(nodes, own, links, hellos, address)
        check(group.records)
    except LaunchError as error:
        for link in links.values():
            _refuse(link, error)
        raise
    finally:
        for link in unknown:
            link.close()
    return group


def _with_variables(hello: Hello, first: Hello) -> NodeRecord:
    """Return the record of a node with the variables that it sets otherwise than the first one."""
    names = sorted({*hello.variables, *first.variables})
    here, there = hello.variables, first.variables
    return replace(hello.node, other_variables={name: here.get(name) for name in names if here.get(name) != there.get(name)})


def _refuse(link: Link, error: LaunchError) -> None:
    """Say why nothing starts, and hang up."""
    with contextlib.suppress(LostError):
        link.send(Refused(what=error.what, why=error.why, fix=error.fix))
    link.close()


def _missing(nodes: Nodes, hellos: dict[int, Hello], seconds: float) -> LaunchError:
    names = [nodes.name(rank) for rank in range(nodes.count) if rank not in {0, *hellos}]
    came = f"; {', '.join(f'node {rank} ({hello.node.host})' for rank, hello in sorted(hellos.items()))} did" if hellos else ""
    return LaunchError(
        f"{', '.join(names).capitalize()} of {nodes.count} did not join within {seconds:.0f} s{came}.",
        where=f"{nodes.master_address}:{nodes.master_port}",
        why="Every node of a run starts the same command, and all of them reach the first one.",
        fix="start it on every node (srun does), check MASTER_ADDR and firewalls, or raise benchmarking.meeting_timeout_seconds",
    )


def _hello_of(link: Link, unknown: list[Link]) -> Hello | None:
    """Return what a new connection says of itself; None: nothing yet, or it is none of ours and closed."""
    try:
        messages = link.poll(LONGEST_HELLO_BYTES)
    except LostError:
        unknown.remove(link)
        link.close()
        return None
    if not messages:
        return None
    unknown.remove(link)
    if isinstance(messages[0], Hello):
        return messages[0]
    link.close()
    return None


def _fits(hello: Hello, own: Hello, link: Link, hellos: dict[int, Hello]) -> bool:
    """Return whether a node belongs to this run; a node of another run is sent away, and this run waits on."""
    if hello.job != own.job or hello.count != own.count or not 0 < hello.rank < own.count or hello.rank in hellos:
        taken = f", and its node {hello.rank} is {hellos[hello.rank].node.host}" if hello.rank in hellos else ""
        what = f"The run at this address is job {own.job or 'without a name'} on {own.count} nodes{taken}."
        this = f"This is node {hello.rank} of {hello.count} of job {hello.job or 'without a name'}."
        fix = "a different NODE_RANK for every node, and a different MASTER_PORT for every run"
        _refuse(link, LaunchError(what, why=this, fix=fix))
        return False
    for name, version in own.software.items():
        if hello.software.get(name) != version:
            other = hello.software.get(name, "none")
            error = LaunchError(
                f"The nodes have different software: {name} {version} on {own.node.host}, {other} on {hello.node.host}.",
                why="One run is one program.",
                fix="one environment on a shared disk, or one container image for all nodes",
            )
            _refuse(link, error)
            raise error
    return True


def listen(nodes: Nodes, seconds: float) -> tuple[socket.socket, str | None]:
    """Listen on the address that the nodes were given for the first one.

    A name is listened on at the address to which it resolves here, unless that is a loopback which the others would not mean
    (Debian gives a machine's own name to 127.0.1.1), or no address of this machine: then on all.

    Returns:
        the listening socket, and its IP address; None for all addresses.

    Raises:
        LaunchError: the name does not resolve, or the port is in use.
    """
    assert nodes.master_address is not None  # several nodes have one
    assert nodes.master_port is not None
    family, address = resolve(nodes.master_address, nodes.master_port, seconds)
    named = nodes.master_address not in {address, "localhost"}
    for host in ("",) if named and ip_address(address).is_loopback else (address, ""):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, nodes.master_port))
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL and host:
                continue
            what = f"Port {nodes.master_port} of {nodes.master_address} cannot be used: {(error.strerror or str(error)).lower()}."
            fix = "end the run that uses it, or set MASTER_PORT to another port on every node"
            raise LaunchError(what, where="MASTER_PORT", fix=fix) from error
        listener.listen(BACKLOG)
        return listener, host or None
    raise AssertionError("all addresses can be listened on")


def accept(listener: socket.socket) -> list[Link]:
    """Return the connections of the next moment."""
    listener.settimeout(POLL_SECONDS)
    try:
        return [Link(listener.accept()[0])]
    except OSError:  # nobody, or gone again
        return []


def resolve(
    host: str, port: int, seconds: float, stopped: Callable[[], bool] = lambda: False
) -> tuple[socket.AddressFamily, str]:
    """Return family and IP address of a host; in a new pod its name may take a while to appear. `stopped` ends the wait.

    Raises:
        LaunchError: it does not resolve.
    """
    ends = time.monotonic() + seconds
    while True:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS < ends and not stopped():
                time.sleep(RETRY_SECONDS)
                continue
            what = f"The name of the first node, {host}, does not resolve on {socket.gethostname()}: {error.strerror}."
            fix = "MASTER_ADDR with its IP address, or a line for it in /etc/hosts"
            raise LaunchError(what, where="MASTER_ADDR", fix=fix) from error
        return family, str(address[0])


# The other nodes.


def join(nodes: Nodes, own: Hello, seconds: float, stopped: Callable[[], bool] = lambda: False) -> Link | None:
    """Connect to the first node, and say who this is. None: `stopped` has ended the wait for it.

    Raises:
        LaunchError: its name does not resolve, or it does not answer in time.
    """
    assert nodes.master_address is not None  # several nodes have one
    assert nodes.master_port is not None
    ends = time.monotonic() + seconds
    family, address = resolve(nodes.master_address, nodes.master_port, seconds, stopped)
    while not stopped():
        connection = socket.socket(family)
        connection.settimeout(min(CONNECT_SECONDS, max(RETRY_SECONDS, ends - time.monotonic())))
        try:
            connection.connect((address, nodes.master_port))
            link = Link(connection)
            link.send(own)
        except (OSError, LostError) as error:
            connection.close()
            if time.monotonic() + RETRY_SECONDS < ends:
                time.sleep(RETRY_SECONDS)
                continue
            raise _unreachable(nodes, address, seconds, error) from error
        return link
    return None


def _unreachable(nodes: Nodes, address: str, seconds: float, error: Exception) -> LaunchError:
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    first = nodes.master_address if nodes.master_address == address else f"{nodes.master_address} ({address})"
    here = f", and {address} is this machine itself" if ip_address(address).is_loopback else ""
    return LaunchError(
        f"The first node, {first}, did not answer on port {nodes.master_port} within {seconds:.0f} s: {reason.lower()}.",
        where="MASTER_ADDR",
        why=f"This is {nodes.name(nodes.rank)} of {nodes.count}{here}.",
        fix="start the same command there with NODE_RANK=0, and open the port between the nodes",
    )
