"""The hosts of --hosts: whether a run can start on them, and the place of this machine among them."""

import contextlib
import socket
from collections.abc import Sequence

from tprimat.core.errors import ConfigError
from tprimat.hardware.nodes import LOOPBACK, Nodes

FIRST = "It is this machine, under the name or address by which the others connect to it."


def place_of(hosts: tuple[str, ...]) -> Nodes:
    """Return the place of this machine, the first of the hosts; the port is not chosen yet."""
    return Nodes(count=len(hosts), rank=0, master_address=hosts[0], hosts=hosts)


def check_hosts(hosts: Sequence[str], nodes: int | None, *, reached: bool) -> None:
    """Refuse hosts on which a run cannot start.

    Args:
        hosts: at least one.
        nodes: of --nodes; None without that flag.
        reached: the first one is looked up as well.

    Raises:
        ConfigError: one is named twice, there is another number of nodes, or the others cannot find the first.
    """
    if twice := [host for host in dict.fromkeys(hosts) if hosts.count(host) > 1]:
        raise ConfigError(
            f"--hosts names {twice[0]} {hosts.count(twice[0])} times.",
            where="--hosts",
            why="Each host is one node, with one launcher.",
            fix=f"--hosts {','.join(dict.fromkeys(hosts))}, and --gpus for the GPUs of each",
        )
    if nodes not in {None, len(hosts)}:
        raise ConfigError(f"--hosts names {len(hosts)}, and --nodes is {nodes}.", where="--nodes", fix="leave --nodes out")
    if reached:
        _check_first(hosts)


def _check_first(hosts: Sequence[str]) -> None:
    """Refuse a first host that is not this machine, or that another host would take for itself."""
    first, here = hosts[0], socket.gethostname()
    try:
        found = addresses_of(first)
    except OSError as error:
        raise ConfigError(
            f"The first host, {first}, does not resolve on {here}: {error.strerror}.",
            where="--hosts",
            why=FIRST,
            fix="its IP address, or a line for it in /etc/hosts",
        ) from error
    if not any(is_own_address(address) for address in found):
        others = ",".join(host for host in hosts if host != here)
        fix = f"--hosts {here},{others}" if here in hosts else f"start it on {first}, or begin with a name of this machine"
        raise ConfigError(f"The first host, {first}, is not this machine, {here}.", where="--hosts", why=FIRST, fix=fix)
    # A name of this machine may be a loopback here, and its address elsewhere: Debian writes 127.0.1.1 for it.
    if first == "localhost" or first.startswith(LOOPBACK):
        for host in hosts[1:]:
            if is_elsewhere(host):
                fix = f"{here}, or its address in the network of {host}"
                raise ConfigError(f"The first host, {first}, means {host} on {host}.", where="--hosts", why=FIRST, fix=fix)


def addresses_of(host: str) -> tuple[str, ...]:
    """Return the IP addresses of a host.

    Raises:
        OSError: it does not resolve.
    """
    return tuple(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))


def is_own_address(address: str) -> bool:
    """Return whether an IP address is one of this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def is_elsewhere(host: str) -> bool:
    """Return whether a host is known not to be this machine; ~/.ssh/config has names that resolve nowhere else."""
    with contextlib.suppress(OSError):
        return not any(is_own_address(address) for address in addresses_of(host))
    return False
