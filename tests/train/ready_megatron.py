"""All that a rank of the embedded engine imports, for a process whose forks are ranks."""

from tprimat.train import early_start, redirect
from tprimat.train.megatron import weight_gradients

early_start.begin_imports()
weight_gradients.install()
redirected = redirect.install()

from tprimat.train.megatron import run  # noqa: E402

early_start.end_imports()  # no rank need look through what was imported, or copy its pages


def train(plan):
    run.train(plan, redirected)
