"""Options of Megatron-LM's functional tests that rows of their measurements leave out (tprimat/data/megatron_cases.yaml)."""

from collections.abc import Mapping
from typing import Any

from tprimat.core.rows import DATA, document

UNFUSED = "no-gradient-accumulation-fusion"


def options_left_out(case: str) -> Mapping[str, Any]:
    """Return what the test of a case passes besides the options of its rows; nothing for an unknown case."""
    cases = document(DATA / "megatron_cases.yaml")
    found = dict(cases["cases"].get(case, {}))
    if case in cases["without_gradient_accumulation_fusion"]:
        found[UNFUSED] = True
    return found
