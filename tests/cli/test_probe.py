"""The probe command, as a process of its own."""

import json
import subprocess
import sys

import pytest

from tprimat.record.store import read_probes


def probe(*arguments):
    command = [sys.executable, "-m", "tprimat.cli.probe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_records_are_printed_as_json_and_kept_with_every_sample(tmp_path):
    done = probe("gemm,memory", "--dtype", "bf16", "--output", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    kept = read_probes(tmp_path / "probes.jsonl")
    assert [row["kind"] for row in printed] == [record.kind for record in kept]
    assert {"gemm", "gemm_search", "copy", "triad", "fill"} == {record.kind for record in kept}
    assert {record.dtype for record in kept if record.kind == "gemm"} == {"bf16"}
    assert all(len(record.seconds) >= 6 and record.error is None for record in kept)
    assert all(record.machine.platform in {"cpu", "cuda", "rocm"} and record.software["torch"] for record in kept)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("gem",), "no probe 'gem'"), (("gemm", "--dtype", "int4"), "int4 is not a dtype"), ((",",), "No probe is named")],
)
def test_a_mistake_is_named_without_a_traceback(arguments, named, tmp_path):
    done = probe(*arguments, "--output", tmp_path)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "probes.jsonl").exists()
