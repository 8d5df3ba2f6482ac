"""compare.py as a user starts it: real processes, real files, real pictures."""

import json
import re
import shutil
from pathlib import Path

import pytest
from changes import jitter
from commands import run_command, words_in

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"


def compare(*arguments, cwd=ROOT):
    return run_command("compare.py", *arguments, cwd=cwd)


def slower(source, target, factor):
    """Copy a run with every step slowed down."""
    shutil.copytree(source, target)
    lines = [json.loads(line) for line in (target / "steps.jsonl").read_text().splitlines()]
    for line, other in zip(lines, jitter(target.name, len(lines)), strict=True):
        line["step_seconds"] *= factor * other
        line["ended_at_seconds"] *= factor
    (target / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = json.loads((target / "run.json").read_text())
    run["run_id"] = target.name
    (target / "run.json").write_text(json.dumps(run))
    return target


@pytest.fixture
def regression(tmp_path):
    """A baseline and the same run five percent slower."""
    before = tmp_path / "before" / "dp"
    shutil.copytree(RUNS / "h100" / "runs" / "h100-llama-0", before / "r0")
    after = tmp_path / "after" / "dp"
    after.mkdir(parents=True)
    slower(before / "r0", after / "r1", 1.05)
    return before, after


def test_two_machines_give_a_table_a_verdict_and_a_picture(tmp_path):
    done = compare("--results-dir", RUNS / "h100", "--results-dir", RUNS / "mi300x", cwd=tmp_path)
    assert done.returncode == 0
    head, verdict = done.stdout.splitlines()[:2]
    assert head == "llama, llama-3.1-8b, 8 GPUs, 262,144 tokens a step, sequence 2,048, bf16"
    lead = r"1\d\.\d % \[1\d\.\d, 1\d\.\d\]"
    assert re.fullmatch(
        rf"MI300X minimal_communication is fastest: {lead} ahead of the next, H100 SXM minimal_communication.*", verdict
    )
    assert "95 % interval" in done.stdout
    assert "Not counted: h100-qwen-oom: out of memory" in done.stdout
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "compare.png" in done.stderr


def test_json_and_markdown_hold_the_runs(tmp_path):
    for kind in ("json", "md"):
        assert compare("--results-dir", RUNS / "h100", "--output", f"compare.{kind}", cwd=tmp_path).returncode == 0
    document = json.loads((tmp_path / "compare.json").read_text())
    assert document["verdicts"][0]["outcome"] == "these runs differ"
    assert document["groups"][0]["runs"][0]["metrics"]["flops_convention"] == "causal"
    assert "| configuration |" in (tmp_path / "compare.md").read_text()


def test_unlike_workloads_are_refused_with_what_differs_and_shown_only_when_asked(tmp_path):
    folders = ("--results-dir", RUNS / "foreign" / "train_amd_prim_llama.json", RUNS / "foreign" / "benchmark_rocm_llama.json")
    done = compare(*folders, "--output", tmp_path / "c.md")
    for words in ("Not compared with the workload above:", "tokens a step 262,144 against 131,072", "dtype unknown"):
        assert words in done.stdout
    assert compare("--results-dir", RUNS, "--output", tmp_path / "c.md").stdout.count("compares anyway") == 1
    anyway = compare(*folders, "--even-if-different", "--output", tmp_path / "c.svg", cwd=tmp_path)
    assert "slower" in anyway.stdout
    assert "tokens a step 262,144 against 131,072. " in anyway.stdout
    assert any("NOT LIKE FOR LIKE" in word for word in words_in(tmp_path / "c.svg"))


def test_the_trait_that_is_the_question_is_named_and_does_not_forbid(tmp_path):
    for name, dtype in (("h100-llama-0", "bf16"), ("h100-llama-1", "fp8")):
        slower(RUNS / "h100" / "runs" / name, tmp_path / name, 1.0)
        file = tmp_path / name / "run.json"
        run = json.loads(file.read_text())
        run["workload"]["matmul_dtype"] = dtype
        file.write_text(json.dumps(run))
    arguments = ("--results-dir", tmp_path, "--output", tmp_path / "c.md")
    assert "Not compared with the workload above: dtype" in compare(*arguments).stdout
    done = compare(*arguments[:3], tmp_path / "c.svg", "--varying", "DType")
    assert "llama H100 SXM, llama-3.1-8b, 8 GPUs, 262,144 tokens a step, sequence 2,048\n" in done.stdout
    assert "Varied dtype (fp8 | bf16)." in done.stdout
    assert "No winner: " in done.stdout
    assert any(word.startswith("No winner: ") for word in words_in(tmp_path / "c.svg"))
    wrong = compare(*arguments, "--varying", "color")
    assert wrong.returncode == 2
    assert "There is no trait 'color'." in wrong.stderr


def test_the_exit_status_of_the_gate_is_what_its_sentence_says(regression, tmp_path):
    before, after = regression

    def gate(margin, *more):
        folders = ("--results-dir", before, after, "--baseline", before)
        done = compare(*folders, "--output", tmp_path / "x.md", "--fail-if-slower", margin, *more)
        assert (done.stdout + done.stderr).count("Only the folders differ") <= 1, done
        return done.returncode, done.stderr

    status, said = gate("1%")
    assert status == 3
    assert re.search(r"4\.\d % slower in these runs, too few to call it slower", said)
    assert "A gate needs 3 runs per side (--runs 3)." in said
    for number in (2, 3):
        slower(before / "r0", before / f"r0-{number}", 1)
        slower(before / "r0", after / f"r1-{number}", 1.05)
    status, said = gate("1%")
    assert status == 1
    assert "gate: failed: after/dp: llama H100 SXM against before/dp: llama H100 SXM: 4." in said
    assert gate("8%") == (0, f"written: {tmp_path}/x.md\ngate: passed: nothing is slower than its baseline by more than 8.0 %.\n")
    status, said = gate("4.7%")
    assert status == 3
    assert re.search(r"Undecided at a margin of 4.7 %: at this ratio, .* would show that it is within", said)
    for silent in (after, before):
        some = sorted(silent.glob("*/steps.jsonl"))[silent == before :]  # all, or all but one
        texts = {file: file.read_text() for file in some}
        for file, text in texts.items():
            file.write_text(re.sub(r'"loss": ?[^,]+', '"loss": null', text))
        status, said = gate("8%")
        assert (status, "Only one side recorded its losses." in said) == (3, True)
        assert ("no winner: " in said) == (silent == before), "the faster side alone is silent"
        for file, text in texts.items():
            file.write_text(text)
    run = json.loads((before / "r0" / "run.json").read_text())
    for number in ("", "-2", "-3"):
        work = {**run["workload"], "matmul_dtype": "fp8"}
        (after / f"r1{number}" / "run.json").write_text(json.dumps({**run, "run_id": f"r1{number}", "workload": work}))
    status, said = gate("1%")
    assert status == 3
    assert "gate: undecided: Not compared: " in said
    for number in ("", "-2", "-3"):
        (after / f"r1{number}" / "run.json").write_text(json.dumps({**run, "run_id": f"r1{number}", "outcome": "failed"}))
    status, said = gate("1%")
    assert status == 3
    assert "does not count" in said


def test_a_folder_as_baseline_pairs_each_configuration_with_its_own_kind(tmp_path):
    for folder in ("before", "after"):
        for name in ("h100-llama-0", "h100-llama-split", "h100-qwen-0"):
            slower(RUNS / "h100" / "runs" / name, tmp_path / folder / f"{folder}-{name}", 1.0 if folder == "before" else 1.001)
    done = compare("--results-dir", "before", "after", "--baseline", "before", "--output", "x.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pairs = [line for line in done.stdout.splitlines() if " against " in line]
    for which in ("llama minimal_communication", "llama memory_optimized", "qwen minimal_communication"):
        kind = which.replace(" ", " H100 SXM ")
        assert sum(f"after: {kind} against before: {kind}: no difference shown" in pair for pair in pairs) == 1
    assert len(pairs) == 3
    for name in ("h100-llama-0", "h100-llama-split"):
        for number in (2, 3):
            for folder in ("before", "after"):
                run = f"{folder}-{name}"
                slower(tmp_path / folder / run, tmp_path / folder / f"{run}-{number}", 1)
    for lost in [*(tmp_path / "after").glob("*split*"), *tmp_path.glob("*/*qwen*")]:
        shutil.rmtree(lost)
    gate = ("--results-dir", tmp_path / "after", "before", "--baseline", tmp_path / "before", "--fail-if-slower", "3%")
    done = compare(*gate, "--output", "x.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "by more than 3.0 %. Not compared: before: llama H100 SXM memory_optimized.\n" in done.stderr


def test_a_bad_file_is_named_skipped_and_counted_and_the_exit_code_says_so(tmp_path):
    shutil.copytree(RUNS / "cpu", tmp_path / "in")
    (tmp_path / "in" / "benchmark_cuda_llama.json").write_text('{\n"platform": "nvd",\n')
    done = compare("--results-dir", tmp_path / "in", "--output", tmp_path / "x.md")
    assert done.returncode == 1
    assert "benchmark_cuda_llama.json:3" in done.stderr
    assert "1 of 2 results skipped" in done.stderr
    assert "llama tiny Example CPU" in done.stdout


def test_every_run_failed_is_said_and_draws_nothing(tmp_path):
    done = compare("--results-dir", RUNS / "h100" / "runs" / "h100-qwen-oom", cwd=tmp_path)
    assert done.returncode == 1
    assert "Not counted: h100-qwen-oom: out of memory" in done.stdout
    assert "No run counts, so there is nothing to compare." in done.stdout
    assert not (tmp_path / "compare.png").exists()
