"""The least memory of a rank, against sums by hand and against what H200 used."""

from pathlib import Path

import pytest

from tprimat.plan.memory import state_bytes
from tprimat.records.discover import load_results
from tprimat.runner.session import RunRequest, prepare

ENGINE = Path(__file__).parents[2] / "benchmarks" / "records" / "h200" / "engine"
WEIGHTS = 8_030_261_248
MASTERS_OFF = "platform_optimizations.nvidia.engine_options.optimizer_states=bf16"


def least(**request):
    asked = {"model": "llama", "platform": "nvidia", "gpus": 4, "dry_run": True, **request}
    return state_bytes(prepare(RunRequest(**asked)).plans[0])


@pytest.mark.parametrize(
    ("request_of", "bytes_of_a_weight"),
    [
        ({"tp": 1}, 2 + 4 + 12 / 4),
        ({"tp": 4}, (2 + 4 + 12) / 4),
        ({"tp": 2, "pp": 2}, (2 + 4 + 12) / 4),
        ({"tp": 1, "precision": "fp32"}, 4 + 4 + 8 / 4),
        ({"tp": 1, "gpus": 1, "settings": (MASTERS_OFF,)}, 2 + 2 + 4),
    ],
)
def test_weights_gradients_and_adam_are_counted(request_of, bytes_of_a_weight):
    assert least(**request_of) == pytest.approx(WEIGHTS * bytes_of_a_weight, abs=1)


@pytest.mark.parametrize(
    ("folder", "degrees"),
    [("dp_mbs1", {"tp": 1}), ("tp2_mbs4", {"tp": 2}), ("tp4_mbs4", {"tp": 4}), ("tp2_pp2_mbs4", {"tp": 2, "pp": 2})],
)
def test_what_an_h200_used_is_more_and_not_twice_as_much(folder, degrees):
    (result,), _ = load_results([ENGINE / folder])
    used = max(step.peak_allocated_bytes for step in result.steps)
    assert used / 2 < least(**degrees) < used
