"""Files that hold anything, next to a good one: they are named, and the good one is read."""

import copy
import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.peak import analyze_peaks
from tprimat.records.benchmark_file import benchmark_document
from tprimat.records.discover import load_results
from tprimat.records.store import RunDirectory
from tprimat.report.comparison import as_json, text
from tprimat.report.peak import text as peak_text
from tprimat.runner.analysis import compare_runs, read_results, report_page

RUNS = Path(__file__).parents[1] / "runs"
GOOD = RUNS / "cpu" / "runs" / "cpu-llama-0"
GOOD_RUN = json.loads((GOOD / "run.json").read_text())
GOOD_STEPS = [json.loads(line) for line in (GOOD / "steps.jsonl").read_text().splitlines()]
GOOD_FILE = json.loads(json.dumps(benchmark_document(RunDirectory(GOOD).read_run(), RunDirectory(GOOD).read_steps(), None))) | {
    "run": GOOD_RUN | {"run_id": "bad"}
}
FOREIGN = json.loads((RUNS / "foreign" / "train_amd_prim_llama.json").read_text())


def changed(document, path, value):
    document = copy.deepcopy(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def a_bad_run(folder, run=None, steps=None):
    """A copy of a good run under another id, with some values changed: {path of keys: value}."""
    record = GOOD_RUN | {"run_id": "bad"}
    for path, value in (run or {}).items():
        record = changed(record, path, value)
    lines = copy.deepcopy(GOOD_STEPS)
    for path, value in (steps or {}).items():
        lines = changed(lines, path, value)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


HUGE = 10**400
BAD_RUNS = {
    "layers: 0": {("workload", "shape", "layers"): 0},
    "layers: 10^400": {("workload", "shape", "layers"): HUGE},
    "rope_base: -1": {("workload", "shape", "rope_base"): -1.0},
    "sequence_tokens: -5": {("workload", "sequence_tokens"): -5},
    "GPUs: -8": {("machine", "gpus_per_node"): -8},
    "GPUs: 10^400": {("machine", "gpus_per_node"): HUGE},
    "NaN memory": {("machine", "memory_bytes"): float("nan")},
    "lone surrogate": {("model",): "\ud800"},
    "newer": {("schema_version",): 3},
    "control characters": {("strategy",): "\x1b]0;title\x07\x1b[2J"},
    "month 99": {("started_at",): "9999-99-99T99:99:99Z"},
    "two lines": {("model",): "llama\nqwen"},
    "a name of 100,000 characters": {("strategy",): "s" * 100_000},
    "options": {("engine_options",): {"x": {"y": float("inf")}}},
    **{f"{key} {name!r}": {(key,): name} for key in ("run_id", "model") for name in ("../x", "a/b", "..", "", "a\\b")},
}
BAD_STEPS = {
    "step 10^30": {(4, "step"): 10**30},
    "step 0": {(4, "step"): 0},
    "1e308 s": {(4, "step_seconds"): 1e308},
    "1e-320 s": {(4, "step_seconds"): 1e-320},
    "tokens: -1": {(4, "tokens"): -1},
    "loss: 1e308": {(4, "loss"): 1e308},
    "NaN memory": {(4, "peak_allocated_bytes"): float("nan")},
}
BAD_FILES = {
    "5,000 digits": '{"run": {}, "steps": [], "x": ' + "9" * 5000 + "}",
    "deep": '{"run":' * 500,
    "NaN memory": changed(FOREIGN, ("memory_values",), [float("nan")] * len(FOREIGN["step_times"])),
    "endless memory": changed(FOREIGN, ("gpu_info", "total_memory_gb"), 1e308),
    "endless GPUs": changed(FOREIGN, ("training_config", "num_gpus"), float("inf")),
    "10^400 seconds": changed(FOREIGN, ("step_times", 0), HUGE),
    "surrogate": json.dumps(changed(FOREIGN, ("parallelism_config",), {"strategy_name": "\ud800"})),
    "newer": changed(GOOD_FILE, ("run", "schema_version"), 3),
    "1e308 s": changed(GOOD_FILE, ("steps", 0, "step_seconds"), 1e308),
}


@pytest.fixture(scope="module")
def many_bad_ones(tmp_path_factory):
    """One good run among all the bad ones above, and what is no file at all."""
    folder = tmp_path_factory.mktemp("many")
    shutil.copytree(GOOD, folder / "good")
    for number, changes in enumerate(BAD_RUNS.values()):
        a_bad_run(folder / f"run-{number}", run=changes)
    for number, changes in enumerate(BAD_STEPS.values()):
        a_bad_run(folder / f"steps-{number}", steps=changes)
    for number, content in enumerate(BAD_FILES.values()):
        (folder / f"benchmark_{number}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    os.mkfifo(folder / "benchmark_pipe.json")
    (folder / "benchmark_zero.json").symlink_to("/dev/zero")
    (folder / "benchmark_loop.json").symlink_to(folder / "benchmark_loop.json")
    (folder / "loop").symlink_to(folder)
    (folder / "run-pipe").mkdir()
    os.mkfifo(folder / "run-pipe" / "run.json")
    shutil.copytree(GOOD, folder / "steps-pipe")
    (folder / "steps-pipe" / "steps.jsonl").unlink()
    os.mkfifo(folder / "steps-pipe" / "steps.jsonl")
    (folder / "probes.jsonl").symlink_to(folder / "probes.jsonl")
    (folder / "benchmark_cut.json.gz").write_bytes(gzip.compress(json.dumps(GOOD_FILE).encode())[:-9])
    with (folder / "benchmark_large.json").open("wb") as file:
        file.truncate(2**40)  # sparse
    return folder


NOT_FILES = 8
ALL_BAD = len(BAD_RUNS) + len(BAD_STEPS) + len(BAD_FILES) + NOT_FILES


def test_every_bad_file_is_named_with_its_rule(many_bad_ones):
    results, problems = load_results([many_bad_ones])
    assert [result.path.name for result in results] == ["good"]
    named = {Path(problem.where.split(":")[0]).relative_to(many_bad_ones).parts[0]: problem for problem in problems}
    assert len(named) == ALL_BAD - 1, sorted(named)
    assert all(problem.why or "cannot be read" in problem.what for problem in problems)
    assert "update" in named[f"run-{list(BAD_RUNS).index('newer')}"].why
    assert named["benchmark_cut.json.gz"].what.endswith("benchmark_cut.json.gz is a damaged gzip file.")
    assert named["benchmark_pipe.json"].what.endswith("benchmark_pipe.json is not a regular file.")


def test_a_packed_result_is_read_and_is_its_plain_copy(tmp_path):
    content = json.dumps(FOREIGN).encode()
    (tmp_path / "train_amd_prim_llama.json").write_bytes(content)
    (tmp_path / "train_amd_prim_llama.json.gz").write_bytes(gzip.compress(content))
    results, problems = load_results([tmp_path])
    assert ([result.run.run_id[:8] for result in results], problems) == (["foreign-"], [])


def leaves(document, path=()):
    """The key paths of all values in a document, inner and outer ones."""
    items = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


EXTREMES = [None, True, 0, -5, HUGE, -HUGE, 2**63, 1e308, 1e-320, -1.0, float("nan"), float("inf"), "", "\ud800", "1"]
JUNK = st.recursive(
    st.one_of(st.sampled_from(EXTREMES), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=3,
)
DOCUMENTS = {
    "bad/run.json": GOOD_RUN | {"run_id": "bad"},
    "bad/steps.jsonl": GOOD_STEPS,
    "benchmark_x.json": GOOD_FILE,
    "train_x.json": FOREIGN,
}
CHANGES = st.one_of(*(st.tuples(st.just(name), st.sampled_from(list(leaves(doc))), JUNK) for name, doc in DOCUMENTS.items()))


@given(CHANGES)
@settings(max_examples=60, deadline=None)
def test_any_value_in_any_place_is_read_or_named_and_hides_no_other(change):
    name, path, value = change
    content = changed(DOCUMENTS[name], path, value)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(GOOD, folder / "good")
        if name.startswith("bad/"):
            a_bad_run(folder / "bad")
        lines = content if name.endswith(".jsonl") else [content]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        results = read_results([folder], MetricOptions(), {})
        assert "good" in {item.result.path.name for item in results.measured}
        assert len(results.measured) + len(results.problems) == 2
        comparison = compare_runs(results.measured, [folder], None)
        peaks = analyze_peaks(results.measured, MetricOptions())
        for shown in (text(comparison), as_json(comparison), peak_text(peaks, show_all=True), report_page(results)):
            shown.encode()
