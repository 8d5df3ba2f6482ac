"""A record says which sources of this program made it, and which variables tuned it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tprimat.records.environment import tuning_variables

ROOT = Path(__file__).parent.parent.parent
ASK = "from tprimat.records.environment import software_versions; print(software_versions()['tprimat'])"


def version(folder):
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_version_changes_with_the_sources_and_with_nothing_else(tmp_path):
    for name in ("one", "other"):
        shutil.copytree(ROOT / "tprimat", tmp_path / name / "tprimat", ignore=shutil.ignore_patterns("__pycache__"))
    first = version(tmp_path / "one")
    assert first == version(tmp_path / "other") == version(ROOT)
    with (tmp_path / "other" / "tprimat" / "units.py").open("a") as file:
        file.write("# a change\n")
    changed = version(tmp_path / "other")
    assert changed != first
    assert changed.split("+")[0] == first.split("+")[0]


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_P2P_DISABLE",
        "NCCL_ALGO",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "HSA_NO_SCRATCH_RECLAIM",
        "GPU_MAX_HW_QUEUES",
        "NVTE_FLASH_ATTN",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "FI_EFA_USE_DEVICE_RDMA",
    ],
)
def test_what_tunes_libraries_is_recorded(name):
    assert tuning_variables({name: "1", "HOME": "/home/me"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_HOME",
        "NCCL_VERSION",
        "NCCL_DEBUG",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_SOCKET_IFNAME",
        "TORCH_FR_BUFFER_SIZE",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_CUDA_ARCH_LIST",
        "TORCH_AUTH_TOKEN",
        "MY_NCCL_ALGO",
        "OMP_NUM_THREADS",
    ],
)
def test_what_names_places_prints_or_is_secret_is_not(name):
    assert tuning_variables({name: "1"}) == {}
