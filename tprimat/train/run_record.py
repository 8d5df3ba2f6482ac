"""The record of a run as a worker writes it: the launcher's, a new one under torchrun by hand, or that of any other Trainer."""

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
    """Return the launcher's record, or a new one, with torch's name of the accelerator."""
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
    """Mark the run as completed; if our launcher runs, it later writes the final outcome."""
    ended_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    directory.write_run(replace(directory.read_run(), outcome="completed", ended_at=ended_at))


class AnyTrainer:
    """Describes a run of any Lightning Trainer, from what the Trainer knows; the start is noted once."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def describe(self, trainer: Any, pl_module: Any) -> RunRecord:
        """Return machine, software and the module's name. Layout, batch and dtype are unknown and stay absent."""
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
