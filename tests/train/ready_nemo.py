"""What takes long of all that a rank of NeMo imports, for a process whose forks are ranks."""

from tprimat.train import cpu_redirect, startup, transformer_engine

startup.begin_imports()
transformer_engine.is_usable()
cpu_redirect.install()

from tprimat.nemo import run  # noqa: E402
from tprimat.nemo.availability import pretrain_recipe  # noqa: E402

pretrain_recipe("llama31_8b", "llama")
startup.end_imports()


def train(plan):
    run.train(plan)
