"""The energy of a token's matrix products: only products of the layer count, at the rows of a micro-batch."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from energy_figures import joules_of_products, joules_per_flop  # noqa: E402
from speed_layouts import LAYOUTS  # noqa: E402

from tprimat.core.flops import flop_per_token  # noqa: E402
from tprimat.core.models import model_shape  # noqa: E402
from tprimat.records.discover import probes_in  # noqa: E402

PROBES = probes_in([ROOT / "benchmarks" / "records" / "h200" / "probes-1gpu"])[0]


def at_one_picojoule(probe):
    return replace(probe, power_watts=700.0, seconds=(probe.flop / 700e12,) * 3) if probe.flop else probe


@pytest.mark.parametrize("name", ["dp_mbs4", "dp_mbs1", "dp_mbs4_fp8"])
def test_a_joule_for_as_many_flop_everywhere_gives_the_flop_of_the_matrix_products(name):
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    found = joules_of_products(layout, [at_one_picojoule(probe) for probe in PROBES])
    products = flop_per_token(model_shape("llama-3.1-8b"), 2048) - 6 * 32 * 4096 * 2048
    assert found == pytest.approx(products * 1e-12, rel=0.01)


def test_shards_and_the_output_layer_are_left_out():
    narrow = [replace(probe, power_watts=1e6) for probe in PROBES if probe.shape.get("n") in {1536, 3584, 7168, 32064}]
    rest = [probe for probe in PROBES if probe.shape.get("n") not in {1536, 3584, 7168, 32064}]
    assert joules_per_flop([*rest, *narrow], 8192, "bf16") == joules_per_flop(PROBES, 8192, "bf16")
