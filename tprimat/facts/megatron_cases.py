"""Options of Megatron-LM's functional tests that rows of their measurements leave out (tprimat/data/megatron_cases.yaml)."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from tprimat.facts.rows import DATA

UNFUSED = "no-gradient-accumulation-fusion"


@cache
def _document() -> dict[str, Any]:
    import yaml  # imported late: programs that look up no fact should start fast

    text = (DATA / "megatron_cases.yaml").read_text(encoding="utf8")
    document: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return document


def options_left_out(case: str) -> Mapping[str, Any]:
    """Return what the test of a case passes besides the options of its rows; nothing for an unknown case."""
    document = _document()
    found = dict(document["cases"].get(case, {}))
    if case in document["without_gradient_accumulation_fusion"]:
        found[UNFUSED] = True
    return found
