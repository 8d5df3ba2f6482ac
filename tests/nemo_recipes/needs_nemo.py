"""Where NeMo is, and why tests that need it are left out elsewhere."""

from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

needs_nemo = pytest.mark.skipif(
    find_spec("nemo") is None, reason="NeMo is not installed in this environment; it has one of its own: make test-nemo"
)
