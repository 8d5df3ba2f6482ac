"""All that a rank of the embedded engine imports, for a process whose forks are ranks."""

from tprimat.megatron import wgrad
from tprimat.train import cpu_redirect, startup

startup.begin_imports()
wgrad.install()
redirected = cpu_redirect.install()

from tprimat.megatron import training  # noqa: E402

startup.end_imports()  # no rank need look through what was imported, or copy its pages


def train(plan):
    training.fit(plan, redirected)
