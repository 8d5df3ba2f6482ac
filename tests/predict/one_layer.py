"""What scripts share that measure one layer on a CPU in a process of their own, and the tests that start them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from changes import replace


def printed_by(script, files):
    """Run a script of this folder on files, and return its lines of output."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *map(str, files)],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def print_one_layer(measure):
    """For each plan on the command line, print what four layers have more than three."""
    import torch.distributed as dist

    from tprimat.megatron.module import initialize_parallel_state
    from tprimat.plan.schema import read_plan

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    plans = [read_plan(Path(path)) for path in sys.argv[1:]]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_parallel_state(plans[0])
    for plan in plans:
        deep, shallow = (measure(replace(plan, shape=replace(plan.workload.shape, layers=layers))) for layers in (4, 3))
        print(json.dumps(deep - shallow))
