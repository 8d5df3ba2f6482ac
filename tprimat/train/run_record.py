"""The record that a worker goes on with: the launcher's, or a first one where torchrun was started by hand."""

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tprimat.errors import RecordError
from tprimat.plan.evidence import first_record
from tprimat.plan.schema import RunPlan
from tprimat.records.environment import software_versions
from tprimat.records.schema import RunRecord
from tprimat.records.store import RunDirectory
from tprimat.train import startup
from tprimat.train.device import describe_machine
from tprimat.train.lightning_api import NAME


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
        start_up=startup.seconds_since(record.started_at) if record.started_at else {},
    )


def note_completed(directory: RunDirectory) -> None:
    """For a worker that torchrun started without our launcher; the launcher has the last word otherwise."""
    ended_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    directory.write_run(replace(directory.read_run(), outcome="completed", ended_at=ended_at))


# The record of a run that is not ours: what any Lightning Trainer tells of itself.


class Stranger:
    """Describes the runs of one callback; the start is noted once."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def describe(self, trainer: Any, pl_module: Any) -> RunRecord:
        """Machine, software and the module's name. How the model is split, its batch and its dtype stay absent: nobody tells."""
        nodes = int(trainer.num_nodes)
        return RunRecord(
            run_id=self.run_id,
            model=type(pl_module).__name__,
            strategy=None,
            engine=NAME,
            matmul_dtype=None,
            tensor_parallel=None,
            pipeline_parallel=None,
            data_parallel=None,
            micro_batch_sequences=None,
            global_batch_sequences=None,
            sequence_tokens=None,
            machine=describe_machine(nodes, max(1, int(trainer.world_size) // nodes)),
            software=software_versions(),
            started_at=self.started_at,
            clock="step_end",
            outcome="running",
        )
