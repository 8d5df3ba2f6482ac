import json
import math
import os

import pytest
from changes import record as record_of

from tprimat.core.errors import RecordError
from tprimat.records.benchmark_file import write_benchmark_file
from tprimat.records.discover import read_result
from tprimat.records.schema import Machine, StepRecord
from tprimat.records.store import RunDirectory


def a_run(**changes):
    fields = {
        "run_id": "r1",
        "model": "llama",
        "strategy": "balanced",
        "engine": "megatron",
        "matmul_dtype": "bf16",
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "data_parallel": 4,
        "micro_batch_sequences": 1,
        "global_batch_sequences": 128,
        "sequence_tokens": 2048,
        "machine": Machine(platform="cuda", accelerator="NVIDIA H200", gpus_per_node=8, nodes=1),
        "started_at": "2026-01-01T00:00:00Z",
        "clock": "step_end",
        "outcome": "completed",
    }
    return record_of(**{**fields, **changes})


def test_a_run_and_its_steps_come_back_as_they_were_written(tmp_path):
    folder = RunDirectory(tmp_path)
    steps = tuple(StepRecord(step=i, step_seconds=0.1 / 3 * i, tokens=128, loss=1 / i) for i in (1, 2, 3))
    folder.write_run(a_run())
    for step in steps:
        folder.append_step(step)
    assert folder.read_run() == a_run()
    assert folder.read_steps() == steps


def test_a_step_that_a_crash_cut_short_is_passed_over_and_the_others_stay(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.append_step(StepRecord(step=1, step_seconds=1.0))
    with folder.steps_file.open("a") as file:
        file.write('{"step":2,"step_sec')
    assert [step.step for step in folder.read_steps()] == [1]


def test_a_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.steps_file.write_text('{"step":1,"step_seconds":1.0}\n{"step":"x"}\n{"step":3,"step_seconds":1.0}\n')
    with pytest.raises(RecordError, match="steps.jsonl:2"):
        folder.read_steps()


def test_an_unknown_key_is_refused_by_name(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.steps_file.write_text('{"step":1,"step_seconds":1.0,"speed":7}\n')
    with pytest.raises(RecordError) as caught:
        folder.read_steps()
    assert "speed" in str(caught.value)


def test_a_loss_that_is_not_a_number_is_written_as_null(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.append_step(StepRecord(step=1, step_seconds=1.0, loss=math.nan, finite=False))
    assert json.loads(folder.steps_file.read_text())["loss"] is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's always-full device")
def test_a_full_disk_is_a_clear_error(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.steps_file.symlink_to("/dev/full")
    with pytest.raises(RecordError, match="No space left"):
        folder.append_step(StepRecord(step=1, step_seconds=1.0))


def test_the_benchmark_file_has_the_keys_that_users_know_and_reads_back(tmp_path):
    steps = (StepRecord(step=1, step_seconds=2.5, loss=11.9, peak_allocated_bytes=54_000_000_000),)
    path = tmp_path / "benchmark_cuda_llama.json"
    write_benchmark_file(path, a_run(), steps, None)
    document = json.loads(path.read_text())
    assert document["platform"] == "nvd"
    assert document["gpu_info"]["device_count"] == 8
    assert document["parallelism_config"]["gradient_accumulation_steps"] == 32
    assert document["parallelism_config"]["strategy_name"] == "balanced"
    assert document["raw_step_times"] == [2.5]
    assert document["raw_memory_values"] == [54.0]
    back = read_result(path)
    assert (back.run, back.steps) == (a_run(), steps)


@pytest.mark.parametrize("torn", ['{"step": 2, "step_sec', '{"step": 2}{"step"', "x" * 20000])
def test_a_line_that_a_kill_cut_short_makes_way_for_the_next(tmp_path, torn):
    run = RunDirectory(tmp_path)
    first, second = StepRecord(step=1, step_seconds=1.0), StepRecord(step=2, step_seconds=2.0)
    run.append_step(first)
    with run.steps_file.open("a") as file:
        file.write(torn)
    assert run.read_steps() == (first,)
    run.append_step(second)
    assert run.read_steps() == (first, second)
