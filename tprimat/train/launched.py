"""The record that a worker goes on with: the launcher's, or a first one where torchrun was started by hand."""

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from tprimat.errors import RecordError
from tprimat.plan.expected import first_record
from tprimat.plan.schema import RunPlan
from tprimat.record.schema import RunRecord
from tprimat.record.store import RunDirectory
from tprimat.train import start_up
from tprimat.train.accelerator import describe_machine


def launched_record(plan: RunPlan) -> RunRecord:
    """What is known so far, with the accelerator under the name that torch gives it."""
    machine = describe_machine(plan.nodes, plan.gpus_per_node)
    try:
        record = RunDirectory(Path(plan.run_directory)).read_run()
    except RecordError:
        started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return first_record(plan, machine, started_at)
    seen = record.machine
    return replace(
        record,
        machine=replace(machine, power_limit_watts=seen.power_limit_watts, driver=seen.driver),
        start_up=start_up.seconds_since(record.started_at) if record.started_at else {},
    )


def note_completed(directory: RunDirectory) -> None:
    """For a worker that torchrun started without our launcher; the launcher has the last word otherwise."""
    ended_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    directory.write_run(replace(directory.read_run(), outcome="completed", ended_at=ended_at))
