"""The record of a run that is not ours: what any Lightning Trainer tells of itself."""

from datetime import datetime, timezone
from typing import Any

from tprimat.record.environment import software_versions
from tprimat.record.schema import RunRecord
from tprimat.train.accelerator import describe_machine
from tprimat.train.lightning_api import NAME


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
