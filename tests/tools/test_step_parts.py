"""Parts of a step at the rates of probes, against arithmetic by hand."""

import sys
from pathlib import Path

import pytest
from changes import ran_with, replace

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from step_parts import step_breakdown  # noqa: E402

from tprimat.analyze.metrics import MetricOptions, run_metrics  # noqa: E402
from tprimat.core.flops import parameters  # noqa: E402
from tprimat.core.models import model_shape  # noqa: E402
from tprimat.records.discover import read_result  # noqa: E402
from tprimat.records.schema import ProbeRecord  # noqa: E402

RECORD = ROOT / "benchmarks" / "records" / "h200" / "engine" / "dp_mbs4" / "benchmark_cuda_llama.json"


@pytest.fixture(scope="module")
def recorded():
    result = read_result(RECORD)
    return result.run, run_metrics(result.run, result.steps, options=MetricOptions())


def probe(run, kind, *, seconds=1.0, **fields):
    machine = replace(run.machine, gpus_per_node=1)
    given = {"variant": None, "shape": {}, "dtype": "bf16", "software": run.software, "started_at": "2026-01-01T00:00:00+00:00"}
    return ProbeRecord(kind=kind, machine=machine, seconds=(seconds,) * 5, **{**given, **fields})


def probes(run):
    return [
        probe(run, "gemm", flop=800 * 10**12),
        probe(run, "copy", bytes=4 * 10**12),
        probe(run, "all_gather", bytes=400 * 10**9, shape={"ranks": 4}),
        probe(run, "reduce_scatter", bytes=200 * 10**9, shape={"ranks": 4}),
    ]


def test_a_step_of_four_replicas(recorded):
    run, metrics = recorded
    parts = step_breakdown(run, metrics, probes(run))
    weights = parameters(model_shape("llama-3.1-8b")).total
    assert parts.model_flops == pytest.approx(metrics.flop_per_token * 64 * 2048 / 4 / 800e12)
    assert parts.optimizer == pytest.approx(30 * weights / 4 / 4e12)
    assert parts.replicas == pytest.approx(4 * weights * 3 / 4 / 150e9 + 2 * weights * 3 / 4 / 300e9)
    assert (parts.tensor_ranks, parts.bubble) == (0, 0)


def test_a_step_split_over_tensor_ranks_and_stages(recorded):
    run, metrics = recorded
    split = ran_with(run, tensor_parallel=2, pipeline_parallel=2, data_parallel=1)
    parts = step_breakdown(split, metrics, probes(run))
    assert parts.replicas == 0
    assert parts.tensor_ranks == pytest.approx(10 * 16 * 64 * 2048 * 4096 * 2 / 2 / 300e9)
    assert parts.bubble == pytest.approx(parts.model_flops / 16)


def test_what_no_probe_tells_is_absent(recorded):
    run, metrics = recorded
    parts = step_breakdown(run, metrics, [])
    assert (parts.model_flops, parts.optimizer, parts.replicas, parts.bubble) == (None, None, None, None)
    assert step_breakdown(replace(run, shape=None), metrics, []) is None
