"""Why a run failed."""

from collections.abc import Sequence

from tprimat.launch.schema import Failure
from tprimat.record.schema import StepRecord


def classify(exit_code: int, lines: Sequence[str], steps: Sequence[StepRecord]) -> Failure | None:
    """None: it completed."""
    if exit_code == 0:
        return None
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return Failure(outcome="failed", cause=f"The process ended with exit code {exit_code}: {last}")
