"""What takes long of all that a rank of NeMo imports, for a process whose forks are ranks."""

from tprimat.megatron import bootstrap
from tprimat.records import environment, schema, store
from tprimat.train import startup

startup.pause_garbage_collection()
startup.transformer_engine_is_usable()
bootstrap.redirect_to_cpu()

from tprimat.nemo import run  # noqa: E402

run.pretrain_recipe("llama31_8b", "llama")
environment.software_versions()
store.adapter(schema.RunRecord)
startup.resume_garbage_collection()


def train(plan):
    run.train(plan)
