"""Started in tests: trains plans of one engine in turn, each on ranks of its own, forked where the engine is imported already.

PYTHONPATH=.:tests/train python tests/train/train_plans.py PLAN.json ...

Importing the embedded engine costs five seconds of a core, and NeMo thirteen: here once, and not once a rank. Ranks that
trained another plan before would keep its process groups, each with a thread that wakes up a hundred times a second. What a
rank then does is what a rank of torchrun does: the same agent (torch.distributed.launcher) starts, numbers and watches it.
"""

import multiprocessing
import sys
from pathlib import Path

from tprimat.launch import rendezvous
from tprimat.plan.schema import read_plan
from tprimat.train import startup
from tprimat.train.worker import quieten

startup.pause_garbage_collection()

from torch.distributed import destroy_process_group  # noqa: E402
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: E402
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry  # noqa: E402
from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: E402


def ready(plan):
    return f"ready_{plan.engine}"


def train_as_rank(plan):
    engine = sys.modules[ready(plan)]  # a fork has it; to import it here would hide that this is none
    quieten()
    engine.train(plan)
    destroy_process_group()


if __name__ == "__main__":
    plans = [read_plan(Path(path)) for path in sys.argv[1:]]
    rendezvous.stay_on_the_loopback()
    rendezvous_handler_registry.register(rendezvous.BACKEND, rendezvous.create_handler)
    multiprocessing.set_forkserver_preload([ready(plans[0])])
    for plan in plans:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=plan.workload.layout.world_size,
            rdzv_backend=rendezvous.BACKEND,
            rdzv_endpoint=f"{rendezvous.LOOPBACK}:0",
            rdzv_configs={"rank": 0},
            run_id=plan.run_id,
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=plan.run_directory),
        )
        elastic_launch(config, train_as_rank)(plan)
