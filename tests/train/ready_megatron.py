"""All that a rank of the embedded engine imports, for a process whose forks are ranks."""

import gc

from tprimat.train import redirect
from tprimat.train.megatron import weight_gradients

weight_gradients.install()
redirected = redirect.install()

from tprimat.train.megatron import run  # noqa: E402

gc.collect()
gc.freeze()  # no rank need look through what was imported, or copy its pages


def train(plan):
    run.train(plan, redirected)
