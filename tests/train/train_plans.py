"""Started by torchrun in tests: trains several plans one after the other in the same ranks.

torchrun --nproc-per-node N tests/train/train_plans.py PLAN.json ...
"""

import sys
from pathlib import Path

from tprimat.train import redirect
from tprimat.train.megatron import weight_gradients

weight_gradients.install()
redirected = redirect.install()

import torch.distributed as dist  # noqa: E402

from tprimat.plan.file import read_plan  # noqa: E402
from tprimat.train.megatron.run import train  # noqa: E402
from tprimat.train.worker import quieten  # noqa: E402

if __name__ == "__main__":
    quieten()
    for path in sys.argv[1:]:
        train(read_plan(Path(path)), redirected)
    dist.destroy_process_group()
