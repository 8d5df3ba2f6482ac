import socket

import pytest
from a_launch import Notes, a_launch

from tprimat.engines.base import Command
from tprimat.launch.run import run
from tprimat.launch.torchrun import free_port, with_port


@pytest.fixture
def taken_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def launch_on(tmp_path, port, **fields):
    plain = a_launch(tmp_path)
    script = ("sh", "-c", 'exec "$0" -S "$1" bind "$MASTER_PORT" steps 1', plain.command.argv[0], plain.command.argv[2])
    environment = {**plain.command.environment, "MASTER_PORT": str(port)}
    return a_launch(tmp_path, command=Command(argv=script, environment=environment), **fields)


def test_a_port_in_use_is_replaced_once(tmp_path, taken_port):
    notes = Notes()
    record, result = run(launch_on(tmp_path, taken_port), notes)
    assert record.outcome == "completed"
    assert len(result.steps) == 1
    assert "Starting once more on port" in notes.notices[0]
    assert len(notes.ends) == 1


def test_a_command_that_insists_on_its_port_fails_after_the_second_start(tmp_path, taken_port):
    notes = Notes()
    record, _ = run(a_launch(tmp_path, "bind", taken_port), notes)
    assert record.outcome == "failed"
    assert "port" in record.cause
    assert sum("EADDRINUSE" in line for line in notes.lines) == 2


def test_several_nodes_keep_the_port_they_agreed_on(tmp_path, taken_port):
    notes = Notes()
    record, _ = run(launch_on(tmp_path, taken_port, nodes=2), notes)
    assert record.outcome == "failed"
    assert notes.notices == []


def test_a_free_port_can_be_listened_on():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("torchrun", "--master_port", "1234", "x.py"), ("torchrun", "--master_port", "7", "x.py")),
        (("torchrun", "--master-port=1234"), ("torchrun", "--master-port=7")),
        (("torchrun", "--rdzv-endpoint=n1:29500"), ("torchrun", "--rdzv-endpoint=n1:7")),
        (("torchrun", "--nnodes=1", "x.py"), ("torchrun", "--nnodes=1", "x.py")),
    ],
)
def test_the_port_is_replaced_wherever_a_command_names_it(before, after):
    assert with_port(Command(argv=before), 7).argv == after


def test_a_port_that_is_passed_into_a_container_is_replaced_too():
    command = Command(argv=("primus-cli", "container", "--env", "MASTER_PORT=1", "--", "train"), environment={"MASTER_PORT": "1"})
    changed = with_port(command, 2)
    assert changed.argv[3] == "MASTER_PORT=2"
    assert changed.environment == {"MASTER_PORT": "2"}
