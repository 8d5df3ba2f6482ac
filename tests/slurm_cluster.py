"""A real SLURM cluster of two nodes on this machine, for tests: a controller, and a slurmd in each of two namespaces.

Every daemon has files, addresses and a key of its own, so nothing in /etc changes and other clusters are not disturbed. It needs
root, because namespaces of networks do, and the packages slurm-wlm, munge and iproute2; .ci/run installs them.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "ip", "unshare", "nsenter")
CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={name}c({net}.1)
SlurmctldPort={port}
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
MailProg=/bin/true
KillWait=12
SlurmdTimeout=60
InactiveLimit=0
OverTimeLimit=0
BatchStartTimeout=10
MessageTimeout=5
SlurmdParameters=config_overrides
NodeName={name}1 NodeAddr={net}.11 CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=2000
NodeName={name}2 NodeAddr={net}.12 CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=2000
PartitionName=all Nodes={name}1,{name}2 Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:4
"""


def missing():
    """Why there can be no cluster here; None where there can."""
    if os.getuid() != 0:
        return "a SLURM cluster in namespaces needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge iproute2"
    network = "ip link add tpa type bridge && ip link add tpb type veth peer name tpc"
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", network]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return None if done.returncode == 0 else f"no networks of our own here: {done.stderr.strip()}"


class Cluster:
    """Two nodes named NAME1 and NAME2."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.name = f"tp{os.getpid() % 100000}n"
        self.net = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self.nodes = (f"{self.name}1", f"{self.name}2")
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._holders = []

    def up(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(name=self.name, net=self.net, port=port, folder=self.folder))
        (self.folder / "cgroup.conf").write_text("")
        hosts = [f"127.0.0.1 localhost {socket.gethostname()}", f"{self.net}.1 {self.name}c"]
        hosts += [f"{self.net}.{11 + index} {node}" for index, node in enumerate(self.nodes)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(32))
        key.chmod(0o600)
        munge = ("key-file=munge.key", "socket=munge.socket", "pid-file=munge.pid", "log-file=munged.log", "seed-file=munge.seed")
        run("munged", "--force", *(f"--{option}={self.folder}/{path}" for option, path in (word.split("=") for word in munge)))
        run("ip", "link", "add", self.name, "type", "bridge")
        run("ip", "addr", "add", f"{self.net}.1/24", "dev", self.name)
        run("ip", "link", "set", self.name, "up")
        own_names = f"mount --bind {self.folder}/hosts /etc/hosts"
        run("unshare", "-m", "-u", "sh", "-c", f"{own_names}; hostname {self.name}c; exec slurmctld -i", env=self.environment)
        for index, node in enumerate(self.nodes):
            self._holders.append(subprocess.Popen(["unshare", "-n", "-m", "-u", "sleep", "infinity"]))
            time.sleep(0.2)
            outside, inside = f"{self.name}v{index}", f"{self.name}e{index}"
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            run("ip", "link", "set", outside, "master", self.name, "up")
            run("ip", "link", "set", inside, "netns", str(self._holders[index].pid))
            steps = [
                "ip link set lo up",
                f"ip link set {inside} name eth0",
                f"ip addr add {self.net}.{11 + index}/24 dev eth0",
                "ip link set eth0 up",
                own_names,
                f"hostname {node}",
                f"mkdir -p {self.folder}/spool/{node}",
                f"exec slurmd -N {node}",
            ]
            self.enter(index, "sh", "-c", "; ".join(steps), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.wait_idle()

    def wait_idle(self, seconds=60.0):
        ends = time.monotonic() + seconds
        while (states := self.enter(0, "sinfo", "-h", "-N", "-o", "%T").stdout.split()) != ["idle", "idle"]:
            assert time.monotonic() < ends, f"the nodes are {states}; see {self.folder}/*.log"
            time.sleep(0.2)

    def enter(self, node, *command, **options):
        """Run a command on a node."""
        given = {"capture_output": "stdout" not in options, "text": True, "timeout": 120, "env": self.environment}
        check = options.pop("check", False)
        return subprocess.run(self.words(node, *command), check=check, **{**given, **options})

    def words(self, node, *command):
        """The command line that runs a command on a node."""
        return ["nsenter", "-t", str(self._holders[node].pid), "-n", "-m", "-u", *map(str, command)]

    def cable(self, node, state):
        """Pull the cable of a node, or plug it in: `down` or `up`."""
        run("ip", "link", "set", f"{self.name}v{node}", state)

    def down(self):
        for holder in self._holders:  # what a power failure does: every process of a node ends without a word
            inode = Path(f"/proc/{holder.pid}/ns/net").stat().st_ino
            assert inode != Path("/proc/self/ns/net").stat().st_ino
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if entry.name.isdigit() and (entry / "ns" / "net").stat().st_ino == inode:
                        os.kill(int(entry.name), signal.SIGKILL)
        for name in ("slurmctld.pid", "munge.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / name).read_text()), signal.SIGKILL)
        for holder in self._holders:
            holder.wait()
        subprocess.run(["ip", "link", "del", self.name], check=False, capture_output=True)


def run(*command, env=None):
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
