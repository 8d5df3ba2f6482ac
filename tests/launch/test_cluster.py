import contextlib
import json
import sys
import time

import pytest

from tprimat.core.errors import LaunchError
from tprimat.hardware.nodes import Nodes, expand_hosts, find_nodes, this_machine, told_nodes
from tprimat.launch.process import RENDEZVOUS, torchrun

AMD_SMI = {
    "gpu_data": [
        {
            "gpu": 0,
            "asic": {"market_name": "AMD Instinct MI350X"},
            "vram": {"size": {"value": 258048, "unit": "MB"}},
            "driver": {"name": "amdgpu", "version": "6.18.3"},
            "limit": {"max_power": {"value": 1000, "unit": "W"}, "socket_power": {"value": 900, "unit": "W"}},
        }
    ]
}


def printing(text):
    return f"cat <<'END'\n{text}\nEND"


def test_nvml_tells_names_memory_power_and_driver(nvml):
    nvml(*[{}] * 4)
    machine = this_machine({})
    assert (machine.platform, machine.accelerator, machine.gpus_per_node, machine.nodes) == ("cuda", "NVIDIA H200", 4, 1)
    assert (machine.memory_bytes, machine.power_limit_watts, machine.driver) == (143771 << 20, 700.0, "570.86.15")


@pytest.mark.parametrize(
    ("value", "count"),
    [("0,2", 2), ("", None), ("-1", None), ("1,-1,2", 1), ("GPU-3", 1), ("GPU-3,GPU-9", 1), ("9", None), ("MIG-a,MIG-b", 2)],
)
def test_cuda_visible_devices_decides_what_counts(nvml, value, count):
    nvml(*[{}] * 4)
    machine = this_machine({"CUDA_VISIBLE_DEVICES": value})
    assert (machine.gpus_per_node if machine else None) == count


def test_different_gpus_have_no_common_name_and_a_slice_has_none(nvml):
    nvml({}, {"name": "NVIDIA L40S", "memory_bytes": 46068 << 20, "power_limit_milliwatts": 350_000})
    machine = this_machine({})
    assert (machine.accelerator, machine.memory_bytes) == ("NVIDIA H200 + NVIDIA L40S", 46068 << 20)
    assert machine.power_limit_watts is None
    assert this_machine({"CUDA_VISIBLE_DEVICES": "MIG-a"}).accelerator is None


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, None),
    ],
)
def test_amd_counts_below_rocr_first(tool, environment, count):
    tool("amd-smi", printing(json.dumps([AMD_SMI["gpu_data"][0] | {"gpu": index} for index in (0, 1)])))
    machine = this_machine(environment)
    assert (machine.gpus_per_node if machine else None) == count


TRACKERS = {"max_power_limit": {"value": 1400, "unit": "W"}, "socket_power_limit": {"value": 1250, "unit": "W"}}
ROCM_7_2 = AMD_SMI["gpu_data"][0] | {"limit": {"ppt0": TRACKERS, "ppt1": dict.fromkeys(TRACKERS, "N/A")}}


@pytest.mark.parametrize(
    ("document", "watts"), [(AMD_SMI, 900.0), (AMD_SMI["gpu_data"], 900.0), ({"gpu_data": [ROCM_7_2]}, 1250.0)]
)
def test_amd_smi_tells_the_same_in_its_old_and_new_forms(tool, document, watts):
    tool("amd-smi", printing("WARNING: User is missing the following required groups: render\n" + json.dumps(document)))
    machine = this_machine({})
    assert (machine.accelerator, machine.memory_bytes) == ("AMD Instinct MI350X", 258048 << 20)
    assert (machine.power_limit_watts, machine.driver) == (watts, "6.18.3")


@pytest.mark.parametrize("text", ["", "no such device", "[1, 2", "a, b"])
def test_a_tool_that_fails_or_babbles_finds_nothing(tool, text):
    tool("amd-smi", printing(text))
    assert this_machine({}) is None


def test_one_node_needs_no_environment():
    assert find_nodes(1, {}) == find_nodes(1, BATCH) == Nodes()
    assert told_nodes(BATCH) is None
    argv = torchrun(Nodes(), 8)
    assert argv[:2] == (sys.executable, str(RENDEZVOUS))
    assert argv[-2:] == ("--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=rank=0")
    assert "--nproc-per-node=8" in argv


SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
BATCH = {name: value for name, value in SLURM.items() if "STEP" not in name}
"""What sbatch's script sees."""
INTERACTIVE = {**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "gpu07"}
INTERACTIVE |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
"""What the shell of salloc sees where it is a step."""
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"}


def test_srun_tells_the_nodes():
    nodes = find_nodes(2, SLURM)
    hosts = ("gpu07", "gpu08")
    assert nodes == Nodes(count=2, rank=1, master_address="gpu07", master_port=23456, job="123456.0", hosts=hosts)
    assert told_nodes(SLURM) == (2, "SLURM_STEP_NUM_NODES")
    assert torchrun(nodes, 8)[-4:] == ("--max-restarts=0", "--nnodes=2", "--rdzv-endpoint=gpu07:23456", "--rdzv-conf=rank=1")


@pytest.mark.parametrize(
    ("environment", "rank", "port"),
    [
        (BY_HAND, 1, 29500),
        ({**BY_HAND, "NODE_RANK": "0", "MASTER_PORT": "1234"}, 0, 1234),
        ({**SLURM, "MASTER_ADDR": "10.0.0.1"}, 1, 29500),
        ({"MASTER_ADDR": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}, 1, 29500),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29400"}, 1, 29400),
        ({"MASTER_ADDR": "10.0.0.1", "NNODES": "2", "NODE_RANK": "1"}, 1, 29500),
    ],
    ids=["by hand", "a port", "srun and an address", "indexed Job", "TrainJob", "NNODES"],
)
def test_each_way_to_tell_the_nodes_is_understood(environment, rank, port):
    nodes = find_nodes(2, environment)
    assert (nodes.count, nodes.rank, nodes.master_address, nodes.master_port) == (2, rank, "10.0.0.1", port)


@pytest.mark.parametrize(
    ("count", "environment", "message"),
    [
        (2, {}, "needs MASTER_ADDR and NODE_RANK"),
        (2, {"MASTER_ADDR": "a"}, "needs NODE_RANK"),
        (2, {"MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK is 2"),
        (2, {"MASTER_ADDR": "a", "NODE_RANK": "first"}, "NODE_RANK is 'first', not a whole number"),
        (2, {**BY_HAND, "MASTER_PORT": "99999"}, "MASTER_PORT is '99999', not a whole number from 1 to 65535"),
        (2, INTERACTIVE, "srun did not start this: it runs on one node of the 2"),
        (2, {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, "SLURM_STEP_NUM_NODES is 1, but"),
        (1, SLURM, "SLURM_STEP_NUM_NODES is 2, but the run is on 1 node"),
        (1, {"PET_NNODES": "4"}, "PET_NNODES is 4"),
        (1, {"PET_NNODES": "1:4"}, "PET_NNODES is '1:4', not a whole number"),
        (2, BATCH, "srun did not start this: it runs on one node of the 2"),
        (2, {**SLURM, "SLURM_STEP_NUM_TASKS": "16"}, "srun started 16 tasks on 2 nodes"),
        (1, {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks on 1 node"),
        (1, {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}, "This is one of several ranks"),
        (1, {"LOCAL_RANK": "3", "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "This is one of several ranks"),
        (2, {**SLURM, "SLURM_STEP_NODELIST": "gpu07"}, "names 1 hosts"),
        (2, {**SLURM, "SLURM_STEP_NODELIST": "n[a-b]"}, "Cannot parse the host list"),
    ],
)
def test_nodes_that_are_not_told_right_are_a_users_error(count, environment, message):
    with pytest.raises(LaunchError, match=message):
        find_nodes(count, environment)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("a[1,3-4],b", ["a1", "a3", "a4", "b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu[1-2].site", ["gpu1.site", "gpu2.site"]),
    ],
)
def test_host_lists_are_expanded(text, names):
    assert list(expand_hosts(text)) == names


@pytest.mark.parametrize("text", ["x" * 100_000, "a[" * 50_000, "a[1]" * 20_000, "a[1-99999999999]", "a[x]", "n[1-999]" * 9])
def test_a_long_or_damaged_host_list_is_read_or_refused_at_once(text):
    began = time.process_time()
    with contextlib.suppress(LaunchError):
        expand_hosts(text)
    assert time.process_time() - began < 1.0
    variables = {"MASTER_ADDR": "h" * 300, "NODE_RANK": "0"}
    with pytest.raises(LaunchError, match="not a host name"):
        find_nodes(2, variables)
