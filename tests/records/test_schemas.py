"""The published JSON Schemas: made from the code, and true of every file that was written."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import jsonschema
import pytest

from tprimat.records.benchmark_file import benchmark_document
from tprimat.records.store import RunDirectory

ROOT = Path(__file__).parents[2]
KINDS = ("benchmark", "plan", "probe", "run", "step", "telemetry")
RUNS = sorted((ROOT / "tests" / "runs").glob("*/runs/*"))


@cache
def validator(kind):
    document = json.loads((ROOT / "schemas" / f"{kind}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def test_the_schemas_in_the_repository_are_those_that_the_code_makes():
    done = subprocess.run([sys.executable, "tools/schemas.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (ROOT / "schemas").iterdir()} == {f"{kind}.schema.json" for kind in KINDS}


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_recorded_runs_are_what_the_schemas_say(folder):
    directory = RunDirectory(folder)
    validator("run").validate(json.loads(directory.run_file.read_text()))
    steps = validator("step")
    for line in directory.steps_file.read_text().splitlines():
        steps.validate(json.loads(line))
    validator("benchmark").validate(benchmark_document(directory.read_run(), directory.read_steps(), None))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("platform",), "nvidia"),
        (("gpu_info", "vendor"), "x"),
        (("performance_metrics",), {"mfu": 0.5}),
        (("run", "outcome"), "fine"),
        (("steps",), [{"step": "1", "step_seconds": 1.0}]),
        (("raw_step_times",), [None]),
    ],
)
def test_a_file_that_says_something_else_is_refused(path, value):
    directory = RunDirectory(RUNS[0])
    document = benchmark_document(directory.read_run(), directory.read_steps(), None)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validator("benchmark").validate(json.loads(json.dumps(document)))
