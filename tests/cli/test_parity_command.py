"""tprimat parity as a user starts it, on recorded runs; tests/train/test_parity_of_runs.py has real trainings."""

import json
import shutil
from pathlib import Path

import pytest
from commands import run_command

RUNS = Path(__file__).parents[1] / "runs" / "h100" / "runs"


def parity(*words, cwd):
    return run_command("parity", *words, cwd=cwd)


def a_side(folder, *, losses=1.0, seeds=(1, 2, 3), **changes):
    """Runs of one configuration with losses as recorded, times a factor."""
    for number, seed in enumerate(seeds):
        place = folder / str(number)
        shutil.copytree(RUNS / "h100-llama-0", place)
        run = json.loads((place / "run.json").read_text())
        run |= {"run_id": f"{folder.name}-{number}", "seed": seed, **changes}
        run["evidence"] |= {"data": "mock"}
        (place / "run.json").write_text(json.dumps(run))
        steps = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
        for step in steps:
            step["loss"] *= losses * (1 + 0.0001 * seed)
        (place / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


@pytest.mark.parametrize(
    ("losses", "status", "outcome", "words"),
    [
        (1.002, 0, "parity", "Parity within 1.0 % by step 40."),
        (1.05, 1, "refuted", "Parity within 1.0 % is refuted at step 8."),
    ],
)
def test_the_verdict_is_words_a_document_an_exit_status_and_a_picture(tmp_path, losses, status, outcome, words):
    a_side(tmp_path / "bf16")
    a_side(tmp_path / "fp8", losses=losses, matmul_dtype="fp8")
    done = parity("bf16", "fp8", cwd=tmp_path)
    assert done.returncode == status
    assert done.stdout.startswith("fp8 against bf16: 3 pairs on the same data, 3 seeds\n" + words)
    assert "What differs: fp8 against bf16." in done.stdout
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(parity("bf16", "fp8", "--json", "--output", "p.svg", cwd=tmp_path).stdout)
    assert (document["outcome"], document["words"], document["seeds"]) == (outcome, words, 3)
    assert document["looks"][0]["difference"]["value"] == pytest.approx(losses - 1, abs=1e-6)


def test_a_margin_may_be_given_and_one_seed_says_how_little_it_shows(tmp_path):
    a_side(tmp_path / "a", seeds=(1,))
    a_side(tmp_path / "b", seeds=(1,), losses=1.05, tensor_parallel=8, data_parallel=1)
    done = parity("a", "b", "--within", "6%", cwd=tmp_path)
    assert (done.returncode, "Parity within 6.0 % by step 40." in done.stdout) == (0, True)
    assert "it holds for these runs only" in done.stdout


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seeds": (4,)}, "No run of A (a) is a pair with one of B (b): seed is 1 in A and 4 in B."),
        ({"seeds": (1,), "sequence_tokens": 1024, "global_batch_sequences": 256}, "sequence length is 2048 in A and 1024 in B"),
    ],
)
def test_runs_that_are_no_pair_are_refused_with_field_and_both_values(tmp_path, changes, says):
    a_side(tmp_path / "a", seeds=(1,))
    a_side(tmp_path / "b", **changes)
    done = parity("a", "b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert not (tmp_path / "parity.png").exists()


def test_a_side_of_two_configurations_or_none_is_a_mistake(tmp_path):
    a_side(tmp_path / "a" / "one")
    a_side(tmp_path / "a" / "two", strategy="balanced")
    done = parity("a", "a", cwd=tmp_path)
    assert done.returncode == 2
    assert "a holds 2 configurations." in done.stderr
    (tmp_path / "empty").mkdir()
    assert "No run in empty has losses." in parity("a/one", "empty", cwd=tmp_path).stderr
    assert parity("a/one", "a/one", "--within", "lots", cwd=tmp_path).returncode == 2
