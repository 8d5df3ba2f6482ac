"""Products in rounds: the same calls at other times, warm and after load, and the spread between rounds."""

import pytest
import torch
from commands import run_command

from tprimat.analyze.probes import newest_of_each, rounds_of
from tprimat.core.effort import Effort
from tprimat.probe import gemm
from tprimat.probe.case import Stopwatch
from tprimat.records.store import read_probes
from tprimat.report.probes import rounds


def test_rounds_are_separate_and_each_has_both_loads():
    cases = gemm.round_cases(("bf16", "fp8"), small=False)
    passes = [(case.shape["round"], case.kind) for case in cases]
    assert list(dict.fromkeys(passes)) == [(number, kind) for number in (1, 2, 3) for kind in ("gemm_warm", "gemm_sustained")]
    assert len(cases) == 3 * 2 * 2 * len(gemm.ROUND_SHAPES)
    assert {case.effort.loaded_seconds for case in cases if case.kind == "gemm_sustained"} == {10.0}


def test_sustained_load_keeps_the_device_busy_before_the_first_sample():
    calls, now = [], [0.0]

    def call():
        calls.append(now[0])
        now[0] += 0.01

    watch = Stopwatch(torch.device("cpu"), cache_bytes=64, clock=lambda: now[0])
    samples = watch.measure(call, Effort(warmup=2, repetitions=10, loaded_seconds=3.0))
    assert len(samples) == 10
    assert now[0] == pytest.approx(3.0 + 12 * 0.01, abs=0.06)


def test_a_probe_on_this_processor_prints_the_spread_between_rounds(tmp_path):
    done = run_command("probe", "rounds", "--dtype", "bf16", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    found = newest_of_each(read_probes(tmp_path / "probes.jsonl"))
    assert len(found) == 3 * 2 * len({case.shape["m"] * case.shape["k"] for case in gemm.round_cases(("bf16",), small=True)})
    first = [probe for probe in found if probe.kind == "gemm_warm" and probe.shape["m"] == found[0].shape["m"]]
    spread = rounds_of(first[:3])
    assert spread.slowest <= spread.median <= spread.fastest
    assert spread.count == 3
    assert "% over 3" in done.stdout
    assert rounds(found).count("% over 3") >= 2
    assert rounds_of(first[:1]) is None
