"""The record of random faults, and the checks of the faults themselves."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "launch"))

from a_launch import first_record  # noqa: E402
from test_sweep import plan_of  # noqa: E402

from tprimat.plan.schema import write_plan  # noqa: E402
from tprimat.records.schema import StepRecord  # noqa: E402
from tprimat.records.store import RunDirectory  # noqa: E402


def faults():
    spec = importlib.util.spec_from_file_location("faults", ROOT / "benchmarks" / "faults.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module
    spec.loader.exec_module(module)
    return module


def test_the_record_has_every_fault_and_nothing_wrong():
    module = faults()
    record = json.loads(module.RECORD.read_text())
    met = Counter(name for sweep in record["sweeps"] for name in sweep["faults"])
    assert record["cells"] >= 200
    assert met.total() >= 180
    assert {name for name in module.FAULTS if met[name] >= 10} == set(module.FAULTS) - set(record["left_out"])
    assert [sweep["wrong"] for sweep in record["sweeps"] if sweep["wrong"]] == []
    assert record["left_in_the_temporary_folder"] == []


def a_run(folder, strategy, number, outcome="completed", steps=6):
    name = f"{strategy}-{number}"
    directory = RunDirectory(folder / "runs" / name)
    directory.steps_file.unlink(missing_ok=True)
    write_plan(directory.plan_file, plan_of(folder, name, strategy=strategy))
    directory.write_run(first_record(run_id=name, strategy=strategy, outcome=outcome))
    for step in range(1, steps + 1):
        directory.append_step(StepRecord(step=step, step_seconds=0.1, tokens=8))


def test_a_lost_run_a_double_one_one_without_an_end_and_lost_steps_are_found(tmp_path):
    module = faults()
    sweep = module.Sweep({}, tmp_path / "out", "none")
    for strategy in module.STRATEGIES:
        for number in range(module.REPEATS):
            a_run(sweep.folder, strategy, number)
    assert module.check(sweep)[0] == []
    first, second, third, fourth, fifth = module.STRATEGIES
    a_run(sweep.folder, first, "double")
    a_run(sweep.folder, second, 0, outcome="running")
    a_run(sweep.folder, third, 0, steps=0)
    (sweep.folder / "runs" / f"{third}-0" / "steps.jsonl").write_text("")
    (sweep.folder / "runs" / f"{fourth}-0" / "run.json").write_text("{")
    (sweep.folder / ".room").write_text("")
    sweep.outputs.append("Traceback (most recent call last):")
    wrong = "\n".join(module.check(sweep)[0])
    for text in (
        f"{first}: 3 runs count, not 2",
        f"{second}-0 has no end or no cause: running",
        f"{third}-0 counts with steps []",
        f"{fourth}: 1 runs count, not 2",
        "1 records are damaged, 0 of them by a fault",
        "left behind:",
        "a traceback",
    ):
        assert text in wrong
    assert fifth not in wrong
