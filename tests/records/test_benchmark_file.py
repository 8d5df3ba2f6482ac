"""The benchmark file is the indented JSON of its document, replaced as a whole."""

import dataclasses
import json

import pytest
from runs.make_runs import a_run

from tprimat.records.benchmark_file import benchmark_document, write_benchmark_file
from tprimat.records.discover import read_result
from tprimat.records.schema import StepRecord


def step_number(number):
    return StepRecord(
        step=number,
        step_seconds=0.1 * number,
        tokens=4096,
        loss=None if number == 2 else 11.0 / number,
        learning_rate=3e-5 / number,
        finite=number != 2,
        peak_allocated_bytes=None if number < 3 else 97_000_000_000 + number,
    )


def test_the_file_has_the_keys_that_users_know_and_reads_back_as_it_was_written(tmp_path):
    steps = tuple(step_number(number) for number in range(1, 3001))
    path = tmp_path / "b.json"
    write_benchmark_file(path, a_run("r1"), steps, None)
    document = json.loads(path.read_text())
    back = read_result(path)
    assert (back.run, back.steps) == (a_run("r1"), steps)
    assert (document["platform"], document["gpu_info"]["device_count"]) == ("nvd", 8)
    parallelism = document["parallelism_config"]
    assert (parallelism["gradient_accumulation_steps"], parallelism["strategy_name"]) == (16, "minimal_communication")
    assert document["raw_step_times"] == [step.step_seconds for step in steps]
    assert document["raw_learning_rates"] == [step.learning_rate for step in steps]
    assert document["raw_memory_values"][:4] == [None, None, 97.000000003, 97.000000004]
    assert document["steps"] == [dataclasses.asdict(step) for step in steps]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "b.json"
    path.write_text("old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(Exception, match="No space left"):
        write_benchmark_file(path, a_run("r1"), [step_number(1)], None)
    assert [file.name for file in tmp_path.iterdir()] == ["b.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(("asked", "now"), [(True, "local"), (False, "none")])
def test_an_older_name_of_an_option_is_read_as_the_present_one(tmp_path, asked, now):
    path = tmp_path / "b.json"
    document = benchmark_document(a_run("r1"), (), None)
    options = {"tp_comm_overlap": False, "enable_cuda_graph": asked}
    run = {name: value for name, value in document["run"].items() if name != "workload"}
    run |= document["run"]["workload"] | {"schema_version": 1, "engine_options": options}
    path.write_text(json.dumps(document | {"run": run}))
    assert read_result(path).run.engine_options == {"tp_comm_overlap": False, "cuda_graph_impl": now}
