"""Start the launchers of the other nodes by ssh, for --hosts."""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tprimat.core.errors import LaunchError
from tprimat.hardware.nodes import Nodes

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""Never ask for a password, and notice a host that is gone."""
END_SECONDS = 15.0
"""For the other launchers to end after the first one has let them go."""


@contextlib.contextmanager
def started_on(place: Nodes, command: Sequence[str], directory: Path) -> Iterator[Callable[[], None]]:
    """Start a command on every host but the first one, and see that it ends; what it prints goes to stderr.

    Yields a check that all of them run, which raises a LaunchError where one has ended: its launcher does not come.

    Raises:
        LaunchError: there is no ssh.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def check() -> None:
        for host, process in processes.items():
            if (status := process.poll()) is not None:
                reason = "ssh could not start it" if status == 255 else f"it ended with status {status}"
                what = f"The launcher on {host} is not there: {reason}."
                fix = f"`ssh {host} true` must work without a password, and the same folder and Python be there"
                raise LaunchError(what, where="--hosts", fix=fix)

    try:
        for rank, host in enumerate(place.hosts[1:], start=1):
            told = (f"MASTER_ADDR={place.master_address}", f"MASTER_PORT={place.master_port}", f"NODE_RANK={rank}")
            remote = f"cd {shlex.quote(str(directory))} && exec {shlex.join(['env', *told, *command])}"
            # In a session of its own, Ctrl-C reaches the launcher here, which ends the others in order.
            processes[host] = subprocess.Popen(
                ["ssh", *OPTIONS, host, remote],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=sys.stderr,
                start_new_session=True,
            )
        yield check
    except FileNotFoundError as error:
        raise LaunchError("There is no ssh here.", where="--hosts", fix="start the command on each host by hand") from error
    finally:
        for process in processes.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
