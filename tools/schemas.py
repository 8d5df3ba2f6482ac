#!/usr/bin/env python3
"""Write the JSON Schema of each file that a run leaves behind into schemas/."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.page import page_parser, update_page  # noqa: E402
from tprimat.core.rows import adapter  # noqa: E402
from tprimat.plan.schema import RunPlan  # noqa: E402
from tprimat.records.benchmark_file import BenchmarkDocument  # noqa: E402
from tprimat.records.schema import ProbeRecord, RunRecord, StepRecord, TelemetrySample  # noqa: E402

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENTS: dict[str, type] = {
    "benchmark": BenchmarkDocument,
    "run": RunRecord,
    "step": StepRecord,
    "plan": RunPlan,
    "probe": ProbeRecord,
    "telemetry": TelemetrySample,
}
"""File name before .schema.json -> type of a document, or of a line of a .jsonl file."""


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of one kind of document."""
    return {"$schema": DIALECT, **adapter(DOCUMENTS[name]).json_schema(mode="serialization")}


def main() -> int:
    """Exit status: 0; 1 where --check finds a schema that the code would write differently."""
    check = page_parser(__doc__).parse_args().check
    texts = {ROOT / "schemas" / f"{name}.schema.json": json.dumps(schema(name), indent=2) + "\n" for name in DOCUMENTS}
    return max(update_page(path, text, check=check, command="python3 tools/schemas.py") for path, text in texts.items())


if __name__ == "__main__":
    sys.exit(main())
