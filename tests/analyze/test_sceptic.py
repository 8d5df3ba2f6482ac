"""Claims that records do not carry: copies, other models of one name, figures that contradict steps, mixed scaling series."""

import json
from pathlib import Path

import pytest
from changes import replace
from commands import run_command

from tprimat.analyze.groups import measure, without_copies
from tprimat.analyze.impossible import contradictions
from tprimat.analyze.metrics import MetricOptions
from tprimat.records.discover import read_result
from tprimat.records.store import to_json

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "tests" / "runs" / "h100" / "runs" / "h100-llama-0"
FOREIGN = ROOT / "tests" / "runs" / "foreign" / "train_nvd_nemo_qwen.json"


def write(folder, run, steps):
    place = folder / "runs" / run.run_id
    place.mkdir(parents=True)
    (place / "run.json").write_text(to_json(run) + "\n", encoding="utf8")
    (place / "steps.jsonl").write_text("".join(to_json(step) + "\n" for step in steps), encoding="utf8")


def test_a_copy_under_another_name_repeats_nothing():
    result = read_result(LLAMA)
    copy = replace(result, run=replace(result.run, run_id="copy"))
    other = replace(copy, steps=tuple(replace(step, step_seconds=step.step_seconds * 1.01) for step in copy.steps))
    found = without_copies([measure(one, MetricOptions()) for one in (result, copy, other)])
    assert [item.not_counted is None for item in found] == [True, False, True]
    assert f"equal those of {result.run.run_id} exactly" in found[1].not_counted


def test_more_memory_than_a_gpu_has_is_impossible():
    result = read_result(LLAMA)
    steps = tuple(replace(step, peak_allocated_bytes=200 * 2**30) for step in result.steps)
    assert any("peak memory is 200.0 GiB" in reason for reason in contradictions(replace(result, steps=steps), None))
    assert not contradictions(result, None)


@pytest.mark.parametrize(
    ("stated", "model"),
    [
        ("llama", "llama"),
        ("Llama-3.1-8B", "llama"),
        ("meta_llama3_8b", "llama"),
        ("qwen2.5_7B", "qwen"),
        ("llama3-70b", "llama3-70b"),
        ("llama2", "llama2"),
        ("Llama-3.2-3B", "Llama-3.2-3B"),
        ("qwen3", "qwen3"),
        ("mistral-7b", "mistral-7b"),
        (None, "qwen"),
    ],
)
def test_another_model_of_a_known_name_has_no_shape(stated, model, tmp_path):
    document = json.loads(FOREIGN.read_text(encoding="utf8")) | ({"model": stated} if stated else {})
    (tmp_path / FOREIGN.name).write_text(json.dumps(document), encoding="utf8")
    run = read_result(tmp_path / FOREIGN.name).run
    assert (run.model, run.ran.shape is not None) == (model, model in {"llama", "qwen"})


def test_a_scaling_series_names_what_else_differs_in_it(tmp_path):
    result = read_result(LLAMA)
    for gpus, watts in ((4, 700.0), (8, 500.0)):
        machine = replace(result.run.machine, gpus_per_node=gpus, power_limit_watts=watts)
        run = replace(result.run, run_id=f"on-{gpus}", machine=machine, data_parallel=gpus)
        seconds = [replace(step, step_seconds=step.step_seconds * 8 / gpus, ended_at_seconds=None) for step in result.steps]
        write(tmp_path, run, seconds)
    out = run_command("scaling", tmp_path, cwd=tmp_path).stdout
    assert "Caution, the points also differ in power limit (700 W | 500 W)." in out
