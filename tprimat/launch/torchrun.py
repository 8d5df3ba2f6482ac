"""Build torchrun command lines, and find a free port for them."""

import socket
import sys
from pathlib import Path

from tprimat.hardware.nodes import Nodes

RENDEZVOUS = Path(__file__).with_name("rendezvous.py")
"""torchrun with a store that does not listen on every interface."""


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
