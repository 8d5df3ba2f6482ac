"""plan.json: the one document that goes into a worker."""

from pathlib import Path

from tprimat.errors import RecordError
from tprimat.plan.schema import RunPlan
from tprimat.record.files import from_json, read_text, to_json, write_atomically


def write_plan(path: Path, plan: RunPlan) -> None:
    """Write a plan.

    Raises:
        RecordError: the folder cannot be written.
    """
    write_atomically(path, to_json(plan, indent=2) + "\n")


def read_plan(path: Path) -> RunPlan:
    """Read a plan.

    Raises:
        RecordError: missing, damaged, or of another version.
    """
    if not path.exists():
        fix = "./benchmark.py writes it when it starts the run; --dry-run only names the place"
        raise RecordError(f"There is no {path}.", where=str(path), fix=fix)
    return from_json(RunPlan, read_text(path), where=str(path))
