"""What takes long of all that a rank of NeMo imports, for a process whose forks are ranks."""

import gc

from tprimat.train import redirect, transformer_engine

transformer_engine.is_usable()
redirected = redirect.install()

from tprimat.train.nemo import run  # noqa: E402
from tprimat.train.nemo.availability import pretrain_recipe  # noqa: E402

pretrain_recipe("llama31_8b", "llama")
gc.collect()
gc.freeze()


def train(plan):
    run.train(plan, redirected)
