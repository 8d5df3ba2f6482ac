"""Engines whose training runs in our own worker, started by torchrun: they write their records themselves."""

from pathlib import Path

from tprimat.engines.base import Command, LineFields
from tprimat.plan.schema import RunPlan
from tprimat.record.store import RunDirectory

ROOT = Path(__file__).parent.parent.parent
DOORS = {"llama": "pretrain_llama.py", "qwen": "pretrain_qwen.py"}


def worker_command(plan: RunPlan) -> Command:
    """The training script of a plan's model, once on each rank; other models than the two with a script share one module."""
    arguments = ("--plan", str(RunDirectory(Path(plan.run_directory)).plan_file))
    door = DOORS.get(plan.model)
    script = (str(ROOT / door),) if door else ("-m", "tprimat.train.worker")
    return Command(
        argv=(*script, *arguments),
        ranks_per_node=plan.gpus_per_node,
        environment=dict(plan.environment),
        directory=None if door else str(ROOT),
    )


class WorkerEngine:
    """A framework that our worker drives."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, plan: RunPlan) -> Command:
        """The worker, on every rank."""
        return worker_command(plan)

    def read_line(self, text: str) -> LineFields | None:
        """Nothing: the worker writes steps.jsonl itself."""
        del text
        return None
