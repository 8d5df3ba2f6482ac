"""What the start of a rank imports, in processes of their own: an import cannot be taken back."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ALONE = "from tprimat.train.startup import OPTIONAL_PACKAGES, import_torchmetrics; import_torchmetrics(); "


def printed(program):
    command = [sys.executable, "-W", "ignore", "-c", "import sys; " + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def as_a_rank():
    """The large packages that a rank of the embedded engine has imported; then a metric, and answers to later questions."""
    engine = "import tprimat.megatron.training; print([name for name in OPTIONAL_PACKAGES if name in sys.modules]); "
    asks = "from lightning_utilities.core.imports import RequirementCache, package_available; "
    works = "from tprimat.train.compat import lightning; from torchmetrics import MeanMetric; metric = MeanMetric(); "
    says = "metric.update(3.0); print(metric.compute().item(), bool(RequirementCache('yaml')), package_available('yaml'))"
    return printed(ALONE + engine + works + asks + says)


def test_a_rank_of_the_embedded_engine_imports_none_of_the_large_packages(as_a_rank):
    assert as_a_rank[0] == "[]"


def test_lightning_and_its_metrics_work_and_the_next_question_is_answered_truly(as_a_rank):
    there = str(find_spec("matplotlib") is not None)
    assert as_a_rank[1:] == ["3.0", there, there]
