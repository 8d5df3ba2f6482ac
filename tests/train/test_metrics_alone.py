"""What the start of a rank imports, in a process of its own: an import cannot be taken back."""

import subprocess
import sys
from importlib.util import find_spec

from planning import LIGHTLY, ROOT

PROGRAM = (
    LIGHTLY
    + """
import sys
from tprimat.train.startup import OPTIONAL_PACKAGES
import tprimat.megatron.training
print([name for name in OPTIONAL_PACKAGES if name in sys.modules])
from lightning_utilities.core.imports import RequirementCache, package_available
from torchmetrics import MeanMetric
metric = MeanMetric()
metric.update(3.0)
print(metric.compute().item(), bool(RequirementCache("yaml")), package_available("yaml"), package_available("matplotlib"))
"""
)


def test_a_rank_imports_none_of_the_large_packages_and_later_questions_are_answered_truly():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    imported, answers = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert imported == "[]"
    assert answers.split() == ["3.0", "True", "True", str(find_spec("matplotlib") is not None)]
