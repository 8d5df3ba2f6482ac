"""Claims that records do not carry: copies, other models of one name, figures that contradict steps, mixed scaling series."""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from changes import evidence as evidence_of
from changes import jitter, replace, slowed
from commands import run_command
from runs.make_runs import write_run

from tprimat.analyze.groups import measure, without_copies
from tprimat.analyze.losses import LOSS_MARGIN, divergence, judge
from tprimat.analyze.metrics import MetricOptions
from tprimat.records.discover import load_results, read_result
from tprimat.report.words import not_counted_words

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "tests" / "runs" / "h100" / "runs" / "h100-llama-0"
TABLE = ("--output", "compare.md")
"""Where a test reads only what is printed: a picture takes most of a second."""
FOREIGN = ROOT / "tests" / "runs" / "foreign" / "train_nvd_nemo_qwen.json"


@pytest.mark.parametrize("digits", [2, 3, 12])
def test_step_times_of_a_run_but_for_rounding_are_its_own(digits):
    result, rng = read_result(LLAMA), np.random.default_rng(1)
    first, second = rng.normal(2.6, 0.05, (2, len(result.steps)))
    runs = [
        replace_steps(result, "original", first),
        replace_steps(result, "copy", first.round(digits)),
        replace_steps(result, "repetition", second.round(digits)),
    ]
    counted = without_copies([measure(one, MetricOptions()) for one in runs])
    assert [item.counts for item in counted] == [True, False, True]
    assert "are those of original, rounded or not: it is a copy" in not_counted_words(counted[1])


def test_no_repetition_in_the_records_is_taken_for_a_copy():
    measured = [measure(one, MetricOptions()) for one in load_results([ROOT / "benchmarks" / "records" / "h100"])[0]]
    assert len(measured) > 80
    assert [item.counts for item in without_copies(measured)] == [item.counts for item in measured]


def replace_steps(result, name, times):
    rows = zip(result.steps, times, strict=True)
    steps = [replace(step, step_seconds=seconds, ended_at_seconds=None) for step, seconds in rows]
    return replace(result, run=replace(result.run, run_id=name), steps=tuple(steps))


def test_times_that_contradict_the_moments_of_steps_do_not_count():
    result = read_result(LLAMA)
    for first, factor, counts in ((0, 0.99, True), (0, 0.97, False), (30, 0.9, False), (39, 1.04, False)):
        steps = [replace(one, step_seconds=one.step_seconds * (factor if one.step > first else 1)) for one in result.steps]
        assert measure(replace(result, steps=tuple(steps)), MetricOptions()).counts == counts
    framework = replace(result, run=replace(result.run, clock="framework"), steps=tuple(steps))
    assert measure(framework, MetricOptions()).counts, "a framework's timer may leave out what lies between steps"


def losses_that_jump(rng, count, noise, jump, start):
    level = 6.4 + 5 * np.exp(-np.arange(count) / 4)
    return level * (1 + noise * rng.normal(size=count)) * np.where(np.arange(count) >= start * count, jump, 1.0)


@pytest.mark.parametrize("count", [8, 12, 20, 60, 200])
def test_a_run_whose_loss_rises_for_good_is_never_ranked(count):
    """At several noises and moments; a quiet run is, and one whose loss spikes and comes back."""
    rng, step = np.random.default_rng(count), read_result(LLAMA).steps[0]

    def diverged(losses):
        return divergence([replace(step, step=place, loss=float(loss)) for place, loss in enumerate(losses, 1)])

    for noise, start in itertools.product((0.001, 0.01, 0.03), (0.5, 2 / 3, 0.8)):
        for jump in (2.0, 25 / 6.4):
            assert diverged(losses_that_jump(rng, count, noise, jump, min(start, 1 - 2 / count)))
        assert not any(diverged(losses_that_jump(rng, count, noise, 1.0, 1)) for _ in range(20))
        spiked = losses_that_jump(rng, count, noise, 1.0, 1)
        spiked[[count // 2, -3]] *= 4
        assert not diverged(spiked)
    if count >= 40:  # noise that hides the jump in any single step
        assert np.mean([diverged(losses_that_jump(rng, count, 0.15, 1.4, 2 / 3)) != () for _ in range(50)]) > 0.8


def test_a_loss_that_turns_and_rises_to_its_end_diverged_however_steeply_it_fell():
    steps = read_result(LLAMA).steps
    doubled = [replace(one, loss=one.loss * (1 + max(0, 2 * one.step / len(steps) - 1))) for one in steps]
    assert [one.kind for one in divergence(doubled)] == ["diverged"]
    assert not divergence(steps)


def test_a_late_divergence_of_one_seed_differs_from_its_reference():
    rng = np.random.default_rng(1)
    for count, noise, jump in itertools.product((12, 20, 60, 200), (0.0, 0.002, 0.01), (1.2, 25 / 6.4)):
        curve = losses_that_jump(rng, count, 0.01, 1.0, 1)
        late = curve * (1 + noise * rng.normal(size=count)) * np.where(np.arange(count) >= 2 * count // 3, jump, 1.0)
        pair = tuple(dict(enumerate(map(float, one), 1)) for one in (curve, late))
        assert judge({7: [pair]}, LOSS_MARGIN).outcome == "different"
        same = {seed: [(pair[0], pair[0])] for seed in (1, 2)}
        assert judge({**same, 3: [pair]}, LOSS_MARGIN).outcome == "different", "one seed of three"


MOCK, TEXT = ({"evidence": evidence_of(source="log", data=data)} for data in ("mock", "text"))


def side(folder, name, times=1.0, *, losses=lambda steps: [step.loss for step in steps], rate=1.0, **fields):
    """One run below a folder, slower by a factor, with other losses and learning rates."""
    result = read_result(LLAMA)
    rows = zip(result.steps, losses(result.steps), jitter(name, len(result.steps)), strict=True)
    steps = [
        replace(
            one,
            step_seconds=one.step_seconds * times * by,
            ended_at_seconds=None,
            loss=loss,
            learning_rate=(one.learning_rate or 1e-4) * rate,
        )
        for one, loss, by in rows
    ]
    write_run(folder, replace(result.run, run_id=name, **fields), steps)


def creeping(steps):
    return [step.loss * (1 + 0.4 * max(0, step.step / len(steps) - 0.5)) for step in steps]


def late(steps):
    return [25.0 if 3 * step.step > 2 * len(steps) else step.loss for step in steps]


def risen(steps):
    return [step.loss * (1.14 if 3 * step.step > 2 * len(steps) else 1) for step in steps]


def high(steps):
    return [25 - 0.01 * step.step + 0.2 * (step.step % 3) for step in steps]


def flat(steps):
    return [steps[0].loss + 0.02 * (step.step % 3) for step in steps]


@pytest.mark.parametrize(
    ("candidate", "status", "words"),
    [
        ([{}, {}, {}], 0, "passed"),
        ([{}, {}, {"outcome": "failed", "cause": "Xid 79"}], 3, "does not count: failed: Xid 79"),
        ([{"losses": late}, {"losses": late}, {"losses": late}], 3, "its loss rose for good, from 3.40 to 25.0"),
        ([{}, {"losses": late}, {}], 3, "it diverged"),
        ([{"losses": creeping}] * 3, 3, "No win: seeds aside, the loss differs by +1"),
        ([{}, {"losses": risen}, {}], 3, "No win: seeds aside, the loss differs by +1"),
        ([{"losses": flat, "engine": "torchtitan"}] * 3, 3, "No win: seeds aside, the loss differs by +3"),
        ([{"losses": high, **TEXT}] * 3, 3, "its loss rose for good, from 11.8 to 24.8"),
    ],
)
def test_the_gate_is_undecided_where_a_run_of_the_candidate_failed_or_diverged(tmp_path, candidate, status, words):
    for number, change in enumerate(candidate):
        side(tmp_path / "before", f"before-{number}", 1 + 0.0007 * number)
        side(tmp_path / "after", f"after-{number}", 0.95 + 0.0011 * number, **change)
    done = run_command("compare.py", "--results-dir", "before", "after", "--fail-if-slower", "3%", *TABLE, cwd=tmp_path)
    assert (done.returncode, words in done.stdout + done.stderr) == (status, True), done.stderr
    assert ("after is fastest" in done.stdout) == (status == 0)


def swinging(steps):
    return [step.loss if step.step < 15 else 30.0 if step.step % 2 else 3.0 for step in steps]


@pytest.mark.parametrize(
    ("losses", "change"),
    [(flat, {"engine": "torchtitan"}), (flat, {"seed": 99}), (swinging, {"seed": None}), (flat, {"seed": 5, "rate": 10.0})],
)
def test_a_diverged_run_wins_nowhere_whatever_engine_seed_or_learning_rate(tmp_path, losses, change):
    for number in range(3):
        side(tmp_path / "before", f"before-{number}", 1 + 0.0007 * number, **MOCK, seed=5)
        side(tmp_path / "after", f"after-{number}", 0.95 + 0.0011 * number, losses=losses, **MOCK, **change)
    folders = ("--results-dir", "before", "after")
    done = run_command("compare.py", *folders, "--fail-if-slower", "3%", *TABLE, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "fastest:" not in done.stdout
    assert "on the same model, data and batch, at 2.6" in done.stdout
    assert "after-0 of llama" in done.stderr
    assert "no win" in done.stderr
    peak = run_command("analyze_peak_throughput.py", *folders, "--output", "peak.txt", cwd=tmp_path).stdout
    assert re.search(r"best configuration .*,\s+folder\s+before\n", peak)
    assert "after-0: its loss ends at" in peak


def test_of_the_runs_of_one_group_the_diverged_one_is_named_and_no_part_of_the_mean(tmp_path):
    for number, losses in enumerate(({}, {}, {"losses": flat, "seed": 99})):
        side(tmp_path / "mix", f"run-{number}", 1 + 0.0007 * number, **losses)
    done = run_command("compare.py", "--results-dir", "mix", "--output", "compare.json", cwd=tmp_path)
    (group,) = json.loads((tmp_path / "compare.json").read_text())["groups"]
    assert [run["run_id"] for run in group["runs"]] == ["run-0", "run-1"]
    assert "Not counted: run-2: its loss ends at" in done.stdout


def test_a_baseline_that_diverged_is_named_as_the_reason(tmp_path):
    side(tmp_path / "before", "before-0", 1.013, losses=flat)
    side(tmp_path / "after", "after-0")
    done = run_command("compare.py", "--results-dir", "before", "after", "--baseline", "before", *TABLE, cwd=tmp_path)
    assert (done.returncode, "before-0: its loss ends at" in done.stderr) == (2, True)


def test_folders_that_a_user_names_are_compared_and_never_merged(tmp_path):
    for number in range(3):
        side(tmp_path / "with", f"with-{number}", 0.97 + 0.0007 * number)
        side(tmp_path / "without", f"without-{number}", 1 + 0.0011 * number)
    compared = run_command("compare.py", "--results-dir", "with", "without", *TABLE, cwd=tmp_path)
    assert "with is fastest: 3." in compared.stdout
    assert "Only the folders differ, as far as recorded (with | without)." in compared.stdout
    peak = run_command("analyze_peak_throughput.py", "--show-all", "--results-dir", "with", "without", "--json", cwd=tmp_path)
    assert [len(one["runs"]) for one in json.loads(peak.stdout)["configurations"]] == [3, 3]
    run_command("report", "with", "without", cwd=tmp_path)
    assert "with is fastest" in (tmp_path / "report.html").read_text(encoding="utf8")
    parent = run_command("compare.py", "--results-dir", ".", *TABLE, cwd=tmp_path)
    assert parent.stdout == compared.stdout, "named by what holds both"
    absolute = run_command("compare.py", "--results-dir", tmp_path, *TABLE, cwd=tmp_path)
    assert "Only the folders differ, as far as recorded (with | without)." in absolute.stdout
    both = run_command("compare.py", "--results-dir", ".", "--baseline", "without", *TABLE, cwd=tmp_path)
    assert "with is fastest: 3." in both.stdout, "beside a part of it, the rest is named"
    for place in sorted(tmp_path.glob("*/runs/*")):
        place.rename(tmp_path / place.name.replace("-", "_"))
    repeated = run_command("compare.py", "--results-dir", ".", *TABLE, cwd=tmp_path)
    assert repeated.stdout == compared.stdout.replace("with/runs/with-0", "with_0"), "a number in the name repeats"
    files = run_command("compare.py", "--results-dir", *tmp_path.glob("with_*"), *TABLE, cwd=tmp_path)
    assert re.search(r" 3 +111 ", files.stdout), "runs of one folder, named one by one, repeat it"


@pytest.mark.parametrize(("names", "one"), [(("tuned", "tuned-2"), True), (("v1.2", "v1.3"), False)])
def test_folders_that_a_number_tells_apart_are_repetitions_and_the_output_says_so(tmp_path, names, one):
    for place, name in enumerate(names):
        side(tmp_path / name, f"run-{place}", 1 + 0.03 * place)
    out = run_command("compare.py", "--results-dir", ".", *TABLE, cwd=tmp_path).stdout
    assert ("that differ only in a number count as repetitions: tuned, tuned-2." in out, "Only the folders differ" in out) == (
        one,
        not one,
    )


def test_names_of_folders_move_nothing_on_a_screen_nor_in_a_page(tmp_path):
    names = ("new\nline", "\x1b[31mred", "<b>|`x`")
    for number, name in enumerate(names):
        side(tmp_path / name, f"run-{number}", 1 + 0.01 * number)
    done = run_command("compare.py", "--results-dir", *names, "--output", "compare.md", cwd=tmp_path)
    run_command("report", *names, cwd=tmp_path)
    files = [(tmp_path / name).read_text(encoding="utf8") for name in ("compare.md", "report.html")]
    assert not any("\x1b" in text or "new\nline" in text for text in (done.stdout, done.stderr, *files))
    assert all(r"new\nline" in text for text in (done.stdout, files[1]))


def test_a_result_is_read_whatever_its_name_and_a_folder_without_one_is_named(tmp_path):
    side(tmp_path / "one", "one")
    for folder in ("imported", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "imported" / "h200.json").write_bytes(FOREIGN.read_bytes())
    (tmp_path / "empty" / "package.json").write_text('{"name": "none"}', encoding="utf8")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    done = run_command("compare.py", "--results-dir", "one", "imported", "empty", "copy", *TABLE, cwd=tmp_path)
    assert "imported/h200.json" in done.stdout
    assert done.returncode == 1
    assert "skipped: empty holds no result." in done.stderr
    assert "skipped: copy adds no run." in done.stderr


@pytest.mark.parametrize(
    ("stated", "model"),
    [
        ("llama", "llama"),
        ("Llama-3.1-8B", "llama"),
        ("qwen2.5_7B", "qwen"),
        ("llama3-70b", "llama3-70b"),
        ("qwen3", "qwen3"),
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
        made = slowed(result, 8 / gpus, run_id=f"on-{gpus}", machine=machine, data_parallel=gpus)
        write_run(tmp_path, made.run, made.steps)
    out = run_command("scaling", tmp_path, cwd=tmp_path).stdout
    assert "Caution, the points also differ in power limit (700 W | 500 W)." in out
