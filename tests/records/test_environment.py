"""A record says which sources of this program made it, and which variables tuned it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tprimat.records.environment import changed_variable, masked_environment, tuning_variables

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
    with (tmp_path / "other" / "tprimat" / "core" / "units.py").open("a") as file:
        file.write("# a change\n")
    changed = version(tmp_path / "other")
    assert changed != first
    assert changed.split("+")[0] == first.split("+")[0]


TUNING = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "=eth0,eth1",
    "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
    "NCCL_IB_PKEY": "0x8001",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "HSA_OVERRIDE_GFX_VERSION": "9.4.2",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "OMP_NUM_THREADS": "8",
    "NVIDIA_TF32_OVERRIDE": "0",
    "LD_PRELOAD": "libjemalloc.so",
    "UCX_TLS": "^tcp",
}
OTHERS = (
    *("HOME", "MY_NCCL_ALGO", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NCCL_VERSION", "NCCL_DEBUG", "NCCL_COMM_ID", "TORCH_LOGS"),
    *("TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_RUN_ID", "TORCH_AUTH", "TORCH_AUTH_TOKEN", "GPU_CREDENTIALS"),
)


def test_what_tunes_libraries_is_recorded_and_no_places_no_printing_and_no_secrets():
    assert tuning_variables({**TUNING, **dict.fromkeys(OTHERS, "1")}) == dict(sorted(TUNING.items()))
    assert masked_environment(TUNING) == TUNING


def test_of_a_path_an_address_or_a_text_only_a_digest_is_kept():
    values = ("/home/me/topology.xml", "redis://me:hunter2@host/x", "Ring, NCCL_PROTO=LL", "a\nb", "\udcff", "x" * 3000, "a b")
    for value in (*values, "hf_aBcD3fGh1jKlMn0pQr5tUv"):
        (kept,) = tuning_variables({"NCCL_TOPO_FILE": value}).values()
        assert re.fullmatch(r"\[value [0-9a-f]{8}\]", kept), value
        assert tuning_variables({"NCCL_TOPO_FILE": kept}) == {"NCCL_TOPO_FILE": kept}
        assert tuning_variables({"NCCL_TOPO_FILE": value + "2"}) != {"NCCL_TOPO_FILE": kept}


def test_a_changed_variable_is_named_with_both_values():
    assert changed_variable({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Ring"}) is None
    assert changed_variable(None, {"NCCL_ALGO": "Ring"}) is None
    assert changed_variable({"NCCL_ALGO": "Ring"}, {}) == "NCCL_ALGO Ring there, not set here"
    assert changed_variable({}, {"NCCL_ALGO": "Tree"}) == "NCCL_ALGO not set there, Tree here"
