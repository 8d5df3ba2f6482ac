"""Build torchrun command lines, and find a free port for them."""

import dataclasses
import re
import socket
import sys
from pathlib import Path

from tprimat.engines.base import Command
from tprimat.hardware.nodes import Nodes

RENDEZVOUS = Path(__file__).with_name("rendezvous.py")
"""torchrun with a store that does not listen on every interface."""
PORT_OPTION = re.compile(r"--(?:master|rdzv)[-_](?:port|endpoint)")


def torchrun(nodes: Nodes, ranks_per_node: int) -> tuple[str, ...]:
    """Return the beginning of a command line that starts `ranks_per_node` Python processes on this node; the script follows.

    On a single node every socket stays on the loopback, and torchrun takes a free port. Failed ranks are not restarted.
    """
    start = (sys.executable, str(RENDEZVOUS), f"--nproc-per-node={ranks_per_node}", "--max-restarts=0")
    if nodes.count == 1:
        return (*start, "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=rank=0")
    endpoint = f"--rdzv-endpoint={nodes.master_address}:{nodes.master_port}"
    return (*start, f"--nnodes={nodes.count}", endpoint, f"--rdzv-conf=rank={nodes.rank}")


def free_port(address: str = "") -> int:
    """Return a TCP port that nobody listens on at this moment, at an IP address or at all of them."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        server.bind((address, 0))
        return int(server.getsockname()[1])


def with_port(command: Command, port: int) -> Command:
    """Return the command with another port wherever it names one: --master_port, --rdzv-endpoint HOST:PORT, MASTER_PORT.

    A command that names none is returned unchanged: torchrun chooses the port, and chooses again at a second start.
    """
    argv = list(command.argv)
    for index, word in enumerate(argv):
        if word.startswith("MASTER_PORT="):  # passed into a container
            argv[index] = f"MASTER_PORT={port}"
        if PORT_OPTION.match(word) is None:
            continue
        option, equals, value = word.partition("=")
        if equals:
            argv[index] = f"{option}={replace_port(value, port)}"
        elif index + 1 < len(argv):
            argv[index + 1] = replace_port(argv[index + 1], port)
    environment = dict(command.environment)
    if "MASTER_PORT" in environment:
        environment["MASTER_PORT"] = str(port)
    return dataclasses.replace(command, argv=tuple(argv), environment=environment)


def replace_port(value: str, port: int) -> str:
    """Return '1234' or 'host:1234' with another port."""
    host, colon, _ = value.rpartition(":")
    return f"{host}{colon}{port}"
