"""`tprimat doctor`: errors of GPUs that the driver reports, named."""

import json

from commands import fake_nvml

from tprimat.hardware.gpus import visible_gpus
from tprimat.hardware.health import check_errors


def test_memory_errors_are_named_with_the_gpu(monkeypatch):
    with fake_nvml():
        faulty = [{}, {"uncorrected_errors": 3}, {"remapped_rows": [0, 2, True, False]}, {"remapped_rows": [0, 9, True, True]}]
        monkeypatch.setenv("FAKE_GPUS", json.dumps([*faulty, {"uncorrected_errors": None, "remapped_rows": None}]))
        check = check_errors(visible_gpus({}))
        assert (check.status, check.finding) == (
            "problem",
            "GPU 1: 3 uncorrected memory errors since the driver was loaded; "
            "GPU 2: a faulty row of its memory is replaced at the next reset; "
            "GPU 3: a faulty row of its memory could not be replaced",
        )
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{}]))
        assert check_errors(visible_gpus({})).status == "ok"
