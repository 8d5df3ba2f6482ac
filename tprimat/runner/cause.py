"""Find why a run did not complete, from what its launcher saw on all nodes."""

from dataclasses import replace

from tprimat.launch.agreement import PART_FAILED
from tprimat.launch.run import Seen
from tprimat.logs.failures import add_log_hint, classify, earliest, ended_early, stopped_by
from tprimat.records.schema import Failure


def cause_of(seen: Seen) -> Failure | None:
    """Return why a run did not complete; None: it did."""
    stopped = seen.stopped
    # The ranks may have died of the signal before the launcher stopped them, and another node may have had it first.
    stops = (stopped, *(ended.failure for ended in seen.elsewhere.values()))
    signalled = stopped is None or any(stop is not None and stop.outcome == "interrupted" for stop in stops)
    if seen.signal is not None and seen.exit_code != 0 and signalled:
        return stopped_by(seen.signal.name, seen.seconds_left)
    for name, ended in seen.elsewhere.items():
        if ended.failure is not None:
            return replace(ended.failure, cause=f"{name}: {ended.failure.cause}")
    if seen.gone is not None:
        return seen.gone
    if stopped is not None and stopped.kind != PART_FAILED:
        return add_log_hint(stopped, seen.lines) if stopped.outcome in {"hung", "timed_out"} else stopped
    here = classify(seen.exit_code, seen.lines, seen.steps, oom_killed=seen.oom_killed)
    failures = [] if here is None else [(here, seen.lines)]
    for name, ended in seen.elsewhere.items():
        there = classify(ended.exit_code, ended.lines, seen.steps) if ended.exit_code else None
        if there is not None:
            failures.append((replace(there, cause=f"{name}: {there.cause}"), ended.lines))
    if failures:
        return earliest(failures)
    return None if seen.planned_steps is None else ended_early(seen.steps, seen.planned_steps)
