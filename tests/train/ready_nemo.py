"""What takes long of all that a rank of NeMo imports, for a process whose forks are ranks."""

from tprimat.train import early_start, redirect, transformer_engine

early_start.begin_imports()
transformer_engine.is_usable()
redirected = redirect.install()

from tprimat.train.nemo import run  # noqa: E402
from tprimat.train.nemo.availability import pretrain_recipe  # noqa: E402

pretrain_recipe("llama31_8b", "llama")
early_start.end_imports()


def train(plan):
    run.train(plan, redirected)
