"""`tprimat doctor`: what it finds on this machine, on one with GPUs that torch cannot use, and on one where nothing can train."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from commands import ROOT, fake_nvml, run_command

from tprimat.runner import doctor
from tprimat.runner.doctor import check_stack, check_torch


def test_this_machine_which_runs_the_tests_can_train(tmp_path):
    done = run_command("doctor", environment={"OUTPUT_DIR": str(tmp_path / "not there yet")})
    assert done.returncode == 0
    assert "This machine can train" in done.stdout
    for name in ("Python", "torch", "Megatron-Core", "Lightning", "disk"):
        assert f"\nok       {name} " in f"\n{done.stdout}", name
    for name in ("engine nemo", "engine primus", "GPUs", "/dev/shm", "SLURM"):
        assert f" {name} " in done.stdout, name
    *checks, empty, _ = done.stdout.splitlines()
    assert empty == ""
    assert all(re.match(r"(ok|absent|problem) {2,}\S| {29}try: ", line) for line in checks), "a pipe gets each finding whole"


@pytest.mark.parametrize(
    ("bridge", "words"), [("0.6.2", "the versions of nvcr.io/nvidia/nemo:26.08"), ("0.9.0", "not a set of versions known")]
)
def test_the_installed_set_of_versions_is_named_if_it_is_known(monkeypatch, bridge, words):
    versions = {"torch": "2.12.0a0", "megatron-core": "0.19.0", "megatron-bridge": bridge}
    monkeypatch.setattr("tprimat.runner.doctor.package_version", versions.get)
    monkeypatch.setenv("CUBLAS_VERSION", "13.3.0.5")
    found = f"cuBLAS 13.3.0.5, torch 2.12.0a0, megatron-core 0.19.0, megatron-bridge {bridge}; {words}"
    assert found in check_stack().finding


def test_gpus_that_this_torch_is_not_built_for_are_a_problem():
    gpus = [{"links": 18}, {"links": 12}]
    told = {"FAKE_GPUS": json.dumps(gpus), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    with fake_nvml():
        done = run_command("doctor", "--json", environment=told)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.stderr == ""
    assert checks["GPUs"]["finding"] == "2 x NVIDIA H200, 140 GiB, driver 570.86.15"
    assert (checks["NVLink"]["status"], checks["NVLink"]["finding"]) == ("problem", "active links differ: 18, 12")
    assert checks["SLURM"]["finding"] == "job 7 on 2 nodes"
    assert "--nodes 2" in checks["SLURM"]["fix"]
    if "+cpu" in checks["torch"]["finding"]:
        assert checks["torch"]["status"] == "problem"
        assert "but the GPUs need cuda" in checks["torch"]["finding"]
        assert "pip uninstall torch" in checks["torch"]["fix"]


def test_where_nothing_can_train_the_status_is_1_and_it_says_what_to_install(tmp_path):
    environment, packages = tmp_path / "bare", tmp_path / "packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages.mkdir()
    for module in ("pydantic", "annotated_types", "typing_extensions.py", "typing_inspection", "yaml", "numpy", "scipy"):
        for path in Path(sysconfig.get_path("purelib")).glob(f"{module}*"):
            (packages / path.name).symlink_to(path)
    (packages / "tprimat").symlink_to(ROOT / "tprimat")
    command = [str(environment / "bin" / "python3"), "-m", "tprimat", "doctor"]
    elsewhere = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(command, cwd=tmp_path, env=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Nothing can train here" in done.stdout
    assert "problem  torch               not installed\n" in done.stdout
    assert "try: make install, or pip install -r requirements.txt\n" in done.stdout


@pytest.mark.parametrize(
    ("torch", "gpus", "status", "words"),
    [
        ({"cuda": "12.8", "hip": None, "devices": 8}, "cuda", "ok", "built for CUDA 12.8, NCCL 2.27.3, sees 8 GPUs"),
        ({"cuda": "12.8", "hip": None, "devices": 0}, "cuda", "problem", "does not see the GPUs"),
        ({"cuda": "12.8", "hip": None, "devices": 0}, "rocm", "problem", "but the GPUs need rocm"),
        ({"cuda": "12.8", "hip": None, "devices": 0}, None, "ok", "built for CUDA 12.8"),
        ({"cuda": None, "hip": "6.4", "devices": 8}, "rocm", "ok", "built for ROCm 6.4, RCCL 2.27.3, sees 8 GPUs"),
        ("OSError: libcudart.so.12: cannot open shared object file", "cuda", "problem", "libcudart.so.12"),
    ],
)
def test_a_build_of_torch_fits_the_gpus_or_not(torch, gpus, status, words):
    installed = torch if isinstance(torch, str) else {"version": "2.13.0", "nccl": (2, 27, 3), **torch}
    check = check_torch(installed, gpus)
    assert (check.status, words in check.finding) == (status, True), check
    assert (check.fix is None) == (status == "ok")
    assert isinstance(installed, str) or "CL 2.27.3" in check.finding


def test_a_missing_or_small_shared_memory_and_a_missing_folder(tmp_path, monkeypatch):
    assert doctor.check_shared_memory(tmp_path / "shm").status == "problem"
    monkeypatch.setattr(doctor, "ENOUGH_SHARED_MEMORY_BYTES", 1 << 60)
    check = doctor.check_shared_memory(tmp_path)
    assert (check.status, "--shm-size" in check.fix) == ("problem", True)
    assert doctor.check_disk(tmp_path / "a" / "b").finding.endswith(f" at {tmp_path}")
    (tmp_path / "file").touch()
    assert doctor.check_disk(tmp_path / "file" / "b").finding == f"{tmp_path / 'file'} is not a writable folder"
