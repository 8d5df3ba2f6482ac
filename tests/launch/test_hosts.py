"""--hosts: the launchers of the other nodes come by a real ssh from a real sshd on this machine."""

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from a_launch import wait_for

from tprimat.records.store import RunDirectory

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
NODE = str(Path(__file__).parent / "a_node.py")
CONFIGURATION = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PidFile none
PermitUserEnvironment no
AcceptEnv FAKE_WORDS
"""
CLIENT = """\
Host other
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/user
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  SendEnv FAKE_WORDS
"""


@pytest.fixture
def hosts(tmp_path, cookie):
    """Environment in which `ssh other` reaches this machine, without a word of the user's own configuration."""
    del cookie
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("ssh or sshd is not installed: apt-get install openssh-server openssh-client")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "sshd_config").write_text(CONFIGURATION.format(folder=tmp_path))
    (tmp_path / "ssh_config").write_text(CLIENT.format(folder=tmp_path, port=port, user=getpass.getuser()))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    command = [SSHD, "-D", "-e", "-p", str(port), "-o", "ListenAddress=127.0.0.1", "-f", tmp_path / "sshd_config"]
    with (tmp_path / "sshd.log").open("w") as log, subprocess.Popen(command, stderr=log) as server:
        wait_for(lambda: "listening" in (tmp_path / "sshd.log").read_text() or server.poll() is not None)
        assert server.poll() is None, (tmp_path / "sshd.log").read_text()
        yield {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        server.terminate()


def launch(folder, environment, names, *words, flags=()):
    command = [sys.executable, NODE, "--hosts", names, "--gpus", "1", "--platform", "cpu", "--model", "llama", "--steps", "4"]
    command += ["--output-dir", "out", *flags]
    given = {**environment, "FAKE_WORDS": json.dumps([str(word) for word in words])}
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=120, check=False)


def test_the_other_host_is_started_by_ssh_with_the_same_layout_and_follows(hosts, tmp_path, left_behind):
    done = launch(tmp_path, hosts, "127.0.0.1,other", "pace", 0.02, "steps", 4, flags=("--pp", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node 1 of 2 follows 127.0.0.1" in done.stderr
    (path,) = (tmp_path / "out" / "runs").iterdir()
    assert (RunDirectory(path).read_run().outcome, (path / "node-1" / "training.log").exists()) == ("completed", True)
    wait_for(lambda: not any("a_node" in Path(f"/proc/{pid}/cmdline").read_text() for pid in left_behind()))


def test_a_host_that_ssh_cannot_reach_is_named_at_once(hosts, tmp_path):
    done = launch(tmp_path, hosts, "127.0.0.1,nowhere.invalid", "pace", 0.02, "steps", 4)
    assert done.returncode == 2
    assert "The launcher on nowhere.invalid is not there: ssh could not start it." in done.stderr
    assert not (tmp_path / "out" / "runs").exists()
