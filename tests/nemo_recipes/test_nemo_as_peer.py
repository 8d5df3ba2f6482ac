"""benchmarks/engine_speed.py --against nemo: the Python that has NeMo is asked what it has."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from needs_nemo import ROOT, needs_nemo

sys.path.insert(0, str(ROOT / "benchmarks"))

from speed_programs import program_named

from tprimat.records.environment import software_versions

pytestmark = needs_nemo
AT_ITS_BEST = (
    "nemo.cross_entropy_fusion_impl=te",
    "engine_options.fp8_scaling=current",
    "nemo.first_last_layers_bf16=false",
)


@pytest.mark.parametrize(
    ("platform", "code", "settings"),
    [
        ("nvidia", "", AT_ITS_BEST),
        ("nvidia", "raise ImportError", ()),
        ("cpu", "", ()),
    ],
)
def test_nemo_runs_with_the_loss_of_a_transformer_engine_that_loads(tmp_path, monkeypatch, platform, code, settings):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    (tmp_path / "transformer_engine" / "pytorch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = program_named("nemo", Namespace(nemo_python=Path(sys.executable), platform=platform))
    assert (program.engine, program.python, program.settings) == ("nemo", sys.executable, settings)
    assert program.software == software_versions()
