"""The probe command: its records, its page, its ranks, and what a resumed call does."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from commands import run_command
from launch.a_launch import wait_for

from tprimat.records.store import read_probes


def probe(*arguments):
    return run_command("probe", *arguments)


def test_records_are_printed_as_json_and_kept_with_every_sample(tmp_path):
    done = probe("gemm,memory", "--dtype", "bf16", "--output", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    kept = read_probes(tmp_path / "probes.jsonl")
    assert [row["kind"] for row in printed] == [record.kind for record in kept]
    assert {"gemm", "model_gemm", "copy", "triad", "fill"} == {record.kind for record in kept}
    assert {record.dtype for record in kept if record.kind == "gemm"} == {"bf16"}
    assert all(len(record.seconds) >= 6 and record.error is None for record in kept)
    assert all(record.machine.platform in {"cpu", "cuda", "rocm"} and record.software["torch"] for record in kept)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU leaves out")
def test_a_cpu_leaves_out_the_dtypes_that_it_does_not_multiply_and_columns_without_a_value(tmp_path):
    done = probe("gemm", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    records = read_probes(tmp_path / "probes.jsonl")
    assert {record.dtype for record in records} == {"bf16", "fp16", "fp32"}
    assert {record.error for record in records} == {None}
    assert re.search(r"^dtype +\(m, k, n\) +median time +n +rate$", done.stdout, re.MULTILINE)
    assert re.search(r"^llama qkv +bf16 +64( +[\d.]+ [MG]FLOP/s){3}$", done.stdout, re.MULTILINE)
    assert "–" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("gem",), "no probe 'gem'"),
        (("gemm", "--dtype", "int4"), "no dtype 'int4'"),
        ((",",), "No probe is named"),
        (("collectives", "--ranks", 1), "needs 2 ranks"),
    ],
)
def test_a_mistake_is_named_without_a_traceback(arguments, named, tmp_path):
    done = probe(*arguments, "--output", tmp_path)
    assert done.returncode == 2
    assert named in done.stderr
    assert not (tmp_path / "probes.jsonl").exists()


def test_two_ranks_measure_together(tmp_path):
    done = probe("collectives,overlap", "--output", tmp_path, "--ranks", 2)
    assert done.returncode == 0, done.stderr
    records = read_probes(tmp_path / "probes.jsonl")
    exchanges, both = records[:10], records[10:]
    assert {record.kind for record in exchanges} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
    named = [name + beside for name in ("all_gather", "reduce_scatter") for beside in ("", " beside products")]
    assert [record.variant for record in both] == ["products", *named]
    assert all(record.error is None and len(record.seconds) == 20 for record in records)
    assert {record.machine.gpus_per_node for record in records} == {2}


def test_ddp_on_one_rank_and_two_when_resumed_starts_only_what_is_not_measured_yet(tmp_path):
    assert probe("ddp", "--output", tmp_path, "--ranks", 1).returncode == 0
    (one,) = read_probes(tmp_path / "probes.jsonl")
    done = probe("ddp", "--output", tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    kept, two = read_probes(tmp_path / "probes.jsonl")
    assert (kept, one.shape["ranks"], two.shape["ranks"]) == (one, 1, 2)
    assert two.flop == 2 * one.flop


def test_probes_stopped_by_their_user_keep_their_measurements_and_do_not_exit_0(tmp_path):
    command = [sys.executable, "-m", "tprimat", "probe", "memory,mlp", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as first:
        wait_for(lambda: any(file.read_bytes().endswith(b"\n") for file in tmp_path.glob("probes.jsonl")))
        os.killpg(first.pid, signal.SIGINT)
        _, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert "stopped; --resume continues from here" in err
    assert "Traceback" not in err
    assert (tmp_path / "probes.md").exists()
