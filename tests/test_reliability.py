"""The record of random faults (benchmarks/faults.py)."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent


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
