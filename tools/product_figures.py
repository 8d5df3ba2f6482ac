"""What another of cuBLASLt's algorithms gains over its first choice: docs/performance.md's table of a layer's products."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from record_figures import NOTHING

from tprimat.core import units
from tprimat.report.tables import table

FILES = {"bf16": "product-algorithms.json", "fp8": "product-algorithms-fp8.json"}
FIRST = "0"
"""cuBLASLt's own first choice."""


def products(results: Path) -> str:
    """List each product with the times of the first choice and of the fastest algorithm, in both dtypes."""
    found = {dtype: _of_file(results / file) for dtype, file in FILES.items() if (results / file).exists()}
    rows = [
        [f"`{product}`", *(cell for dtype in FILES for cell in _cells(found.get(dtype, {}).get(product)))]
        for product in found.get("bf16", {})
    ]
    header = ("product", *(f"{dtype}, {what}" for dtype in FILES for what in ("first choice", "fastest", "first / fastest")))
    return table(header, rows, left=1) if rows else NOTHING


def _of_file(file: Path) -> dict[str, dict[str, Any]]:
    """Return a file's products by the name of matrix and pass."""
    document = json.loads(file.read_text(encoding="utf8"))
    return {re.sub(r"^\S+ (.*), \d+ rows, \w+$", r"\1", name): found for name, found in document["products"].items()}


def _cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return [units.ABSENT] * 3
    middle = {name: statistics.median(one["seconds"]) for name, one in found["algorithms"].items() if name != "torch"}
    fastest = min(middle.values())
    return [units.seconds(middle[FIRST]), units.seconds(fastest), f"{middle[FIRST] / fastest:.3f}"]
