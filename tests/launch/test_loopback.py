"""The sockets of a run on one node: what listens, who can connect, and what a host without a name or a name server costs."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid

import pytest

from tprimat.hardware.nodes import Nodes
from tprimat.launch.process import torchrun
from tprimat.launch.rendezvous import open_listener, stay_on_the_loopback

RANK = """
import json, os, socket, struct, sys, time
import torch, torch.distributed as dist

def listening(pids):
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]"))
            except OSError:
                pass
    for table in ("tcp", "tcp6"):
        for line in list(open(f"/proc/net/{table}"))[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                packed = b"".join(struct.pack("<I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
                yield socket.inet_ntop(socket.AF_INET if table == "tcp" else socket.AF_INET6, packed), int(port, 16)

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
if dist.get_rank() == 0:
    with socket.create_server(("0.0.0.0", 0)) as open_to_all:
        print(json.dumps({"sum": total.item(), "sockets": list(listening({*pids, os.getppid()}))}), flush=True)
        sys.stdin.readline()
dist.barrier()
dist.destroy_process_group()
"""
"""Prints which sockets of both ranks and of torchrun listen, and waits for a line. One socket of its own is open to all."""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"
ADDRESS = "192.0.2.1"


@contextlib.contextmanager
def two_namespaces():
    """The words that start a command in each of two networks joined by a cable; None where this user may not make them."""
    name = f"tp{uuid.uuid4().hex[:8]}"
    here, there = f"{name}a", f"{name}b"
    steps = [
        f"netns add {here}",
        f"netns add {there}",
        f"link add {name}0 netns {here} type veth peer name {name}1 netns {there}",
        f"-n {here} addr add {ADDRESS}/30 dev {name}0",
        f"-n {there} addr add 192.0.2.2/30 dev {name}1",
        f"-n {here} link set {name}0 up",
        f"-n {there} link set {name}1 up",
        f"-n {here} link set lo up",
    ]
    try:
        made = shutil.which("ip") and all(
            subprocess.run(["ip", *step.split()], check=False, capture_output=True).returncode == 0 for step in steps
        )
        yield tuple(["ip", "netns", "exec", namespace] for namespace in (here, there)) if made else None
    finally:
        if shutil.which("ip"):
            for namespace in (here, there):
                subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def test_a_run_on_one_node_needs_no_host_name_and_only_this_machine_can_connect_to_it(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with two_namespaces() as namespaces:
        command = [*torchrun(Nodes(), 2), str(script)]
        if namespaces is not None:
            nameless = ["unshare", "--uts", "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh"]
            command = [*namespaces[0], *nameless, *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
            seen = json.loads(run.stdout.readline())
            *sockets, (everywhere, its_port) = sorted(map(tuple, seen["sockets"]), key=lambda socket: socket[0] == "0.0.0.0")
            reached = [port for _, port in [*sockets, (everywhere, its_port)] if namespaces and connects(namespaces[1], port)]
            run.communicate("go on\n")
    assert run.returncode == 0
    assert seen["sum"] == 2
    assert everywhere == "0.0.0.0"
    assert {address for address, _ in sockets} == {"127.0.0.1"}
    assert len(sockets) >= 2, "the store and gloo"
    assert reached == ([its_port] if namespaces else [])


def test_the_interfaces_that_a_user_chose_are_kept(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    for name in ("GLOO_SOCKET_IFNAME", "RES_OPTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "getfqdn", socket.getfqdn)
    stay_on_the_loopback()
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("eth7", "lo")


def connects(namespace, port):
    command = [*namespace, sys.executable, "-S", "-c", CONNECT, ADDRESS, str(port)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_the_store_of_several_nodes_listens_on_the_address_that_was_named():
    with open_listener("127.0.0.1", 0) as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            open_listener("127.0.0.1", port)
        socket.create_connection((address, port)).close()
    for host in ("localhost", "gpu07.cluster", "203.0.113.77"):  # names, and the address of a translator
        assert open_listener(host, 0) is None, "torch listens itself"
