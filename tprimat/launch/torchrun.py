"""Start the ranks of this node with torchrun, on a free port."""

import dataclasses
import re
import socket
import sys

from tprimat.engines.base import Command
from tprimat.hardware.nodes import Nodes

OPTION = re.compile(r"--(?:master|rdzv)[-_](?P<kind>port|endpoint)")


def torchrun(nodes: Nodes, ranks_per_node: int) -> tuple[str, ...]:
    """The beginning of a command line that starts `ranks_per_node` Python processes on this node; the script follows.

    On a single node torchrun chooses a free port itself (--standalone); no run is started again when a rank fails.
    """
    start = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks_per_node}", "--max-restarts=0")
    if nodes.count == 1:
        return (*start, "--standalone")
    place = (f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}")
    return (*start, *place, f"--master-addr={nodes.master_address}", f"--master-port={nodes.master_port}")


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as server:
        server.bind(("", 0))
        port: int = server.getsockname()[1]
        return port


def on_another_port(command: Command, port: int) -> Command:
    """The command with another port where it names one: --master_port, --rdzv-endpoint HOST:PORT, MASTER_PORT.

    A command that names none has torchrun choose; it stays as it is, and the second start chooses again.
    """
    argv = list(command.argv)
    for index, word in enumerate(argv):
        if word.startswith("MASTER_PORT="):  # passed into a container
            argv[index] = f"MASTER_PORT={port}"
        match = OPTION.match(word)
        if match is None:
            continue
        option, equals, value = word.partition("=")
        if equals:
            argv[index] = f"{option}={with_port(value, port)}"
        elif index + 1 < len(argv):
            argv[index + 1] = with_port(argv[index + 1], port)
    environment = dict(command.environment)
    if "MASTER_PORT" in environment:
        environment["MASTER_PORT"] = str(port)
    return dataclasses.replace(command, argv=tuple(argv), environment=environment)


def with_port(value: str, port: int) -> str:
    """'1234' or 'host:1234' with another number."""
    host, colon, _ = value.rpartition(":")
    return f"{host}{colon}{port}"
