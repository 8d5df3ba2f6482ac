"""Result files of every maker, good and bad, through real folders."""

import json
import shutil
from pathlib import Path

import pytest
from commands import run_command

from tprimat.core.models import model_shape
from tprimat.records.benchmark_file import write_benchmark_file
from tprimat.records.discover import load_results, read_result

RUNS = Path(__file__).parent.parent / "runs"
FOREIGN = RUNS / "foreign"


def write(path, document):
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf8")
    return path


def minimal(**changes):
    return {"platform": "nvd", "training_config": {"num_gpus": 8}, "raw_step_times": [2.0, 1.0, 1.0], **changes}


def test_all_runs_of_a_tree_are_found():
    results, problems = load_results([RUNS])
    assert problems == []
    assert len(results) == 10 + 4 + 4  # groups, published, foreign
    assert sum(result.run.counts for result in results) == 9 + 4 + 4


def test_a_primus_file_is_read_as_it_says():
    result = read_result(FOREIGN / "train_amd_prim_llama.json")
    run = result.run
    assert (run.model, run.engine, run.machine.platform, run.clock) == ("llama", "primus", "rocm", "framework")
    assert run.ran.shape == model_shape("llama-3.1-8b")
    assert (run.strategy, run.ran.tensor_parallel, run.ran.pipeline_parallel, run.ran.data_parallel) == ("TP1_PP2_SP0", 1, 2, 4)
    assert (run.machine.gpus, run.machine.accelerator, run.machine.memory_bytes) == (8, "AMD Instinct MI300X", 206141650000)
    assert (len(result.steps), result.steps[0].step, result.steps[0].tokens) == (24, 1, 64 * 2048)
    assert (result.steps[0].loss, result.steps[0].learning_rate) == (10.0, 1e-5)


def test_words_for_absent_and_lists_of_another_length_become_none():
    result = read_result(FOREIGN / "benchmark_cuda_qwen.json")
    assert (result.run.ran.global_batch_sequences, result.run.ran.sequence_tokens, result.run.strategy) == (None, None, None)
    step = result.steps[0]
    assert (step.tokens, step.learning_rate, step.peak_allocated_bytes) == (None, None, 54_500_000_000)


def test_a_loss_that_is_not_a_number_marks_its_step(tmp_path):
    path = write(tmp_path / "benchmark_cuda_llama.json", '{"platform": "nvd", "raw_step_times": [1.0], "raw_loss_values": [NaN]}')
    (step,) = read_result(path).steps
    assert (step.loss, step.finite) == (None, False)


def test_a_copy_of_a_file_counts_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "benchmark_cuda_llama.json", minimal())
    assert len(load_results([tmp_path])[0]) == 1


def test_a_run_with_a_folder_and_a_benchmark_file_counts_once_from_its_folder(tmp_path):
    (original,), _ = load_results([RUNS / "cpu"])
    write_benchmark_file(tmp_path / "benchmark_cpu_llama.json", original.run, original.steps, None)
    (alone,), _ = load_results([tmp_path])
    assert (alone.run, alone.steps) == (original.run, original.steps)
    (both,), _ = load_results([tmp_path, RUNS / "cpu", RUNS / "cpu" / "runs" / "cpu-llama-0" / "run.json"])
    assert both.run == original.run
    (nested,), _ = load_results([RUNS / "cpu"])
    assert nested.path.is_dir()


@pytest.mark.parametrize("left", [5, 0, None])
def test_a_folder_that_lost_or_doubled_steps_is_named_and_the_benchmark_file_of_its_run_counts(tmp_path, left):
    shutil.copytree(RUNS / "cpu", tmp_path / "cpu")
    (original,), _ = load_results([tmp_path / "cpu"])
    write_benchmark_file(tmp_path / "cpu" / "benchmark_cpu_llama.json", original.run, original.steps, None)
    file = original.path / "steps.jsonl"
    if left is None:
        file.write_text(file.read_text() * 2)
    else:
        file.write_text("".join(f"{line}\n" for line in file.read_text().split("\n")[:left]) + '{"step": 6, "step_sec')
    (loaded,), (problem,) = load_results([tmp_path / "cpu"])
    assert (loaded.run, loaded.steps) == (original.run, original.steps)
    doubled = f"{file} has step 1 after step {len(original.steps)}."
    assert problem.what in {f"{original.path} holds {left} of the {len(original.steps)} steps of its run.", doubled}


def test_steps_are_missed_by_the_plan_where_the_record_does_not_count_them(tmp_path):
    shutil.copytree(RUNS / "cpu" / "runs" / "cpu-llama-0", tmp_path / "run")
    for name, content in (("run.json", {"steps_recorded": None}), ("plan.json", {"steps": 40})):
        file = tmp_path / "run" / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | content))
    file = tmp_path / "run" / "steps.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().split("\n")[:5]))
    assert "holds 5 of the 40 steps" in load_results([tmp_path])[1][0].what
    for steps in (-5, 10**400, "40", None):
        (tmp_path / "run" / "plan.json").write_text(json.dumps({"steps": steps}))
        assert load_results([tmp_path])[0][0].run.steps_recorded is None
    (tmp_path / "run" / "plan.json").unlink()
    done = run_command("compare.py", "--results-dir", tmp_path, "--output", tmp_path / "c.md")
    assert "Its number of steps is not recorded: some may be lost: cpu-llama-0" in done.stdout


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not JSON"),
        ('{\n"platform": ', "is not JSON"),
        ("[1, 2]", "holds no result"),
        ("{}", "no step times"),
        (minimal(raw_step_times=[1.0, -1.0]), "does not fit schema version"),
        (minimal(raw_step_times=[1.0, "fast"]), "'fast'"),
        (minimal(platform="tpu"), "platform is 'tpu'"),
        (minimal(training_config={"num_gpus": "eight"}), "num_gpus is 'eight'"),
        (minimal(training_config={"num_gpus": 0}), "num_gpus is 0"),
        (minimal(gpu_info={"total_memory_gb": "lots"}), "'lots'"),
        ({"run": 3, "steps": "x"}, "does not fit schema version"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_file_is_named_with_the_rule_and_hides_no_other(tmp_path, content, reason):
    bad = write(tmp_path / "benchmark_cuda_bad.json", content)
    write(tmp_path / "benchmark_cuda_llama.json", minimal())
    results, problems = load_results([tmp_path])
    assert [result.run.model for result in results] == ["llama"]
    (problem,) = problems
    assert reason in problem.what
    assert str(bad) in problem.where


def test_a_path_that_is_not_there_is_a_problem_and_the_others_are_read(tmp_path):
    results, (problem,) = load_results([tmp_path / "nowhere", FOREIGN])
    assert len(results) == 4
    assert "There is no" in problem.what


def test_two_runs_of_one_name_are_both_named_and_a_copy_read_from_a_log_is_none(tmp_path):
    for place, factor, name in (
        ("a", 1.0, "loss"),
        ("b", 1.0002, "step_seconds"),
        ("c", 1.05, "step_seconds"),
        ("d", 1.05, "loss"),
    ):
        shutil.copytree(RUNS / "cpu", tmp_path / place)
        file = next((tmp_path / place).rglob("steps.jsonl"))
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [json.dumps(step | {name: factor * step[name]}) for step in steps]
        file.write_text("\n".join(lines) + "\n")
    (kept,), problems = load_results([tmp_path])
    other = [f"{tmp_path}/{place}/runs/cpu-llama-0" for place in "cd"]
    assert [one.what for one in problems] == [f"{kept.path} and {path} are two runs named cpu-llama-0." for path in other]


def test_a_name_with_folders_in_it_is_its_last_part(tmp_path):
    write(tmp_path / "old numbers.json", minimal(model="meta-llama/Llama-2"))
    assert read_result(tmp_path / "old numbers.json").run.model == "Llama-2"
