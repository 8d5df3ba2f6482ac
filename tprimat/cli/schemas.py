"""python -m tprimat.cli.schemas: write the JSON Schema of each file that a run leaves behind."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tprimat.errors import UserError
from tprimat.plan.schema import RunPlan
from tprimat.records.benchmark_file import BenchmarkDocument
from tprimat.records.files import adapter, write_atomically
from tprimat.records.schema import MicroBatchTrial, ProbeRecord, RunRecord, StepRecord, TelemetrySample

FOLDER = Path(__file__).parent.parent.parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENTS: dict[str, type] = {
    "benchmark": BenchmarkDocument,
    "run": RunRecord,
    "step": StepRecord,
    "plan": RunPlan,
    "probe": ProbeRecord,
    "telemetry": TelemetrySample,
    "trial": MicroBatchTrial,
}
"""File name before .schema.json -> type of a document, or of a line of a .jsonl file."""


def main(arguments: list[str] | None = None) -> int:
    """Write the schemas.

    Returns:
        0, or 2 where the folder cannot be written.
    """
    parser = argparse.ArgumentParser(prog="python -m tprimat.cli.schemas", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, default=FOLDER, metavar="PATH", help="default: schemas/ of the checkout")
    folder: Path = parser.parse_args(arguments).output_dir
    try:
        for name in DOCUMENTS:
            write_atomically(folder / f"{name}.schema.json", json.dumps(schema(name), indent=2) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of one kind of document."""
    return {"$schema": DIALECT, **adapter(DOCUMENTS[name]).json_schema(mode="serialization")}


if __name__ == "__main__":
    sys.exit(main())
