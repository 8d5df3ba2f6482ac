"""Training data: the same global batch whatever the layout, and real text that is read once."""

import json

import numpy as np
import pytest
from commands import run_command
from planning import make_plan

from tprimat.core.errors import LaunchError
from tprimat.train.data import GlobalBatches, MockSequences, open_text, text_files


def plan_for(tmp_path, dataset, **settings):
    return make_plan(tmp_path / "run", "llama", {"training.data.dataset": dataset, "training.duration.max_steps": 2, **settings})


def test_all_replicas_together_see_the_same_global_batch(tmp_path):
    plan = plan_for(tmp_path, "mock")
    mock = MockSequences(seed=7, sequence_tokens=16, vocabulary=512)
    whole = next(iter(GlobalBatches(mock, plan, 16, (0, 1))))[0]
    for ranks, micro_batch in ((1, 1), (2, 1), (4, 2), (8, 2)):
        parts = [next(iter(GlobalBatches(mock, plan, micro_batch, (rank, ranks)))) for rank in range(ranks)]
        in_order = [parts[rank][number] for number in range(len(parts[0])) for rank in range(ranks)]
        assert np.array_equal(np.concatenate(in_order), whole)


def test_mock_data_is_a_function_of_seed_and_index_with_a_rule_that_can_be_learnt():
    one, again, other = (MockSequences(seed=seed, sequence_tokens=2000, vocabulary=512) for seed in (1, 1, 2))
    assert np.array_equal(one.sequence(3), again.sequence(3))
    assert not np.array_equal(one.sequence(3), other.sequence(3))
    assert not np.array_equal(one.sequence(3), one.sequence(4))
    steps = np.diff(one.sequence(0)) % 512
    assert np.mean(steps == np.bincount(steps).argmax()) > 0.7
    assert one.sequence(0).max() < 512


def test_text_becomes_bytes_in_windows_of_the_stream(tmp_path):
    text = "The quick brown fox. " * 40
    (tmp_path / "a.txt").write_text(text)
    data = open_text(plan_for(tmp_path, f"text:{tmp_path / 'a.txt'}", **{"training.data.sequence_length": 32}), 512)
    assert len(data.stream) == len(text) + 1
    assert not list((tmp_path / "run").iterdir()), "the tokens' file is gone once all ranks have mapped it"
    window = data.sequence(0)
    assert window.shape == (33,)
    assert bytes(window.astype(np.uint8)).decode() in text
    starts = {bytes(data.sequence(index).astype(np.uint8)) for index in range(data.windows)}
    assert len(starts) > data.windows // 21


def test_text_beyond_the_limit_is_left_out_and_the_record_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tprimat.train.data.MAX_TEXT_BYTES", 2**20)
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_bytes(b"x" * 700_000)
    data = open_text(plan_for(tmp_path, f"text:{tmp_path / 'texts'}"), 512)
    assert len(data.stream) == 2**20 + 2
    assert data.description.endswith("(bytes, the first 1 MiB)")


def test_each_epoch_reads_every_window_once_in_another_order(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 8)
    data = open_text(plan_for(tmp_path, f"text:{tmp_path / 'a.txt'}", **{"training.data.sequence_length": 50}), 512)
    epochs = [[tuple(data.sequence(epoch * data.windows + place)) for place in range(data.windows)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_a_folder_is_read_whole_and_the_standard_library_is_there(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.md", "deep/c.rst"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in text_files(str(tmp_path))] == ["a.md", "b.txt", "c.rst"]
    assert len(text_files("stdlib")) > 50


@pytest.mark.parametrize(
    ("content", "vocabulary", "message"),
    [("short", 512, "fewer than one sequence"), ("long enough " * 50, 100, "the model knows 100")],
)
def test_text_that_cannot_be_trained_on_is_refused_with_the_way_out(tmp_path, content, vocabulary, message):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(LaunchError, match=message) as caught:
        open_text(plan_for(tmp_path, f"text:{tmp_path / 'a.txt'}"), vocabulary)
    assert caught.value.fix


def test_text_that_is_missing_is_refused_before_anything_starts(tmp_path):
    command = ["--model", "llama", "--gpus", "1", "--output-dir", tmp_path / "out", "--dry-run"]
    missing = run_command("benchmark.py", *command, "--set", "data=text:/no/such/folder")
    assert (missing.returncode, "There is no /no/such/folder." in missing.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def test_text_that_only_the_worker_can_judge_ends_the_run_with_its_cause(tmp_path):
    (tmp_path / "short.txt").write_text("always")
    words = (
        "--model",
        "llama",
        "--gpus",
        "1",
        "--set",
        f"data=text:{tmp_path / 'short.txt'}",
        "--output-dir",
        tmp_path,
        "--json",
    )
    done = run_command("benchmark.py", *words)
    assert done.returncode == 1
    (run,) = json.loads(done.stdout)["runs"]
    assert "7 tokens, fewer than one sequence of 64" in run["run"]["cause"]
