"""When this rank reached the stages of its start: what a user waits for before the first step."""

from datetime import datetime, timezone

from tprimat.record.schema import StartUp

_reached: dict[StartUp, datetime] = {}


def reached(stage: StartUp) -> None:
    """Note that a stage is reached; only its first time counts."""
    _reached.setdefault(stage, datetime.now(timezone.utc))


def seconds_since(started_at: str) -> dict[StartUp, float]:
    """Each stage reached so far -> seconds from a moment (ISO 8601) to it, by the wall clock, which launcher and ranks share."""
    start = datetime.fromisoformat(started_at)
    return {stage: round((moment - start).total_seconds(), 3) for stage, moment in _reached.items()}
