"""torchrun with a store that listens on one address instead of all of them: python rendezvous.py --rdzv-endpoint=HOST:PORT ...

torch's TCPStore binds to every interface whatever address it is given, and `torchrun --standalone` also looks up the host's name
and unpickles what it finds in that store. Here the node of rank 0 opens the socket itself, on the loopback for a single node,
and nothing is pickled: the ranks follow from the node's rank. This file is started by its path, from every working directory.
"""

import errno
import fcntl
import gc
import os
import socket
import struct
import sys
import tempfile
from ipaddress import ip_address
from typing import Any

BACKEND = "bound"
"""The name under which torchrun finds this rendezvous: --rdzv-backend=bound --rdzv-conf=rank=NODE_RANK."""
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
STORE_TIMEOUT_SECONDS = 600
"""torchrun's own default."""
SIOCGIFADDR = 0x8915
"""Asks Linux for the address of an interface; netdevice(7)."""
BACKLOG = 4096
"""Connections that wait to be accepted: the ranks of a large run connect at once."""


def main(arguments: list[str] | None = None) -> None:
    """Run torchrun with this rendezvous; `--rdzv-endpoint=127.0.0.1:0` keeps a single node on the loopback."""
    words = sys.argv[1:] if arguments is None else arguments
    endpoint = next((word.partition("=")[2] for word in words if word.startswith("--rdzv-endpoint=")), "")
    host, _, port = endpoint.rpartition(":")
    if host == LOOPBACK:
        stay_on_the_loopback()
    elif host:
        use_the_interface_towards(host, int(port))
    for name in [name for name in os.environ if name.startswith("PET_")]:  # Kubeflow's, which torchrun would read as flags
        del os.environ[name]
    if sys.prefix != sys.base_prefix:  # as activation does: python3 in Megatron-LM's Makefile is then this one
        os.environ["PATH"] = f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    gc.disable()  # torch creates many objects and no garbage: searching for it is a quarter of the import
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    gc.freeze()
    gc.enable()
    rendezvous_handler_registry.register(BACKEND, create_handler)
    # With the pid in its name, the launcher finds the folder where torchrun is killed (process_tree.py).
    with tempfile.TemporaryDirectory(prefix=f"tprimat-torchrun-{os.getpid()}-", ignore_cleanup_errors=True) as logs:
        run.main([f"--rdzv-backend={BACKEND}", f"--log-dir={logs}", *words])


def stay_on_the_loopback() -> None:
    """Connect the ranks of a single node over the loopback, and never wait for a host name. The user's own settings win.

    On one node NCCL's sockets only introduce the ranks to each other, and torch looks up names only for its messages.
    Where no name server answers, each look-up takes ten seconds or more.
    """
    if LOOPBACK_INTERFACE in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK_INTERFACE}")  # "=": exactly this name, not a prefix
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")  # resolv.conf(5)
    socket.getfqdn = lambda name="": name or "localhost"


def use_the_interface_towards(host: str, port: int) -> None:
    """Let gloo connect the ranks through the interface to the first node: the machine's own name may resolve to a loopback."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel only chooses the way
            own = probe.getsockname()[0]
            name = next((name for _, name in socket.if_nameindex() if address_of(probe, name) == own), None)
    except OSError:  # no such name: the rendezvous itself says so
        return
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def address_of(any_socket: socket.socket, interface: str) -> str | None:
    """Return the IPv4 address of an interface; None where it has none."""
    try:
        answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def create_handler(parameters: Any) -> Any:
    """Return torchrun's static rendezvous, of torch's RendezvousParameters, with a store on a socket of our own."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    class BoundRendezvous(StaticTCPRendezvous):
        """Opens the listening socket for the store."""

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> Any:
            listener = open_listener(self.master_addr, self.master_port) if self.rank == 0 and not self._store else None
            if listener is not None:
                self.master_port = listener.getsockname()[1]
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    self.world_size,
                    is_master=True,
                    timeout=self.timeout,
                    multi_tenant=True,
                    master_listen_fd=listener.detach(),  # the store closes it
                )
            return super().next_rendezvous()

    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    rank, timeout = int(parameters.config["rank"]), parameters.get_as_int("timeout", STORE_TIMEOUT_SECONDS)
    return BoundRendezvous(host, port, rank, parameters.max_nodes, parameters.run_id, timeout)


def open_listener(host: str, port: int) -> socket.socket | None:
    """Listen on one IP address of this machine; port 0 takes a free one. Raises OSError: the port is in use.

    Returns None for a name, which the other nodes may resolve to another address, and for an address that is not this machine's
    own (behind a translator): there torch listens on all interfaces itself.
    """
    try:
        family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return None
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    listener.listen(BACKLOG)
    return listener


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules must not hide others of the same name
    main()
