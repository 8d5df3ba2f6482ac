import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command
from fake_primus import make_machine

ROOT = Path(__file__).parent.parent.parent


def piped(program, reader, **variables):
    """Both ends of a pipe. Returns: status of the program, what it said beside it."""
    line, environment = f"{sys.executable} {program} | {reader}; exit ${{PIPESTATUS[0]}}", os.environ | variables
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_a_run_goes_on_when_its_output_is_read_no_more(tmp_path):
    words = f"--platform amd --model llama --steps 6 --output-dir {tmp_path}/out 2>&1"
    status, said = piped(f"benchmark.py {words}", "head -1", **make_machine(tmp_path), FAKE_PRIMUS="once")
    assert status == 0, said
    assert (tmp_path / "out" / "benchmark_rocm_llama.json").exists()
    assert '"outcome": "completed"' in next(tmp_path.glob("out/runs/*/run.json")).read_text()


def test_a_table_that_nobody_reads_to_its_end_ends_without_a_traceback():
    status, said = piped("-m tprimat models --json", "true")
    assert (status, said) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_table_that_did_not_get_to_the_disk_is_no_success():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "tprimat", "models"]
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: not all of the output could be written: No space left on device\n"


def test_a_closed_descriptor_is_none_of_its_business():
    done = subprocess.run(["bash", "-c", f"{sys.executable} validate_config.py >&- 2>&-"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0


def test_the_next_command_is_said_on_a_terminal_only(tmp_path):
    shutil.copytree(ROOT / "tests" / "runs" / "cpu", tmp_path / "output")
    assert "next:" not in run_command("compare.py", "--output", "compare.md", cwd=tmp_path).stderr
    leader, follower = pty.openpty()
    command = [sys.executable, str(ROOT / "compare.py"), "--output", "compare.md"]
    subprocess.run(command, cwd=tmp_path, stdin=follower, stdout=follower, stderr=follower, check=True, timeout=120)
    os.close(follower)
    said = os.read(leader, 65536).decode()
    os.close(leader)
    assert said.count("next: python3 -m tprimat report output") == 1
