"""All that a rank of the embedded engine imports, for a process whose forks are ranks."""

from tprimat.megatron import bootstrap
from tprimat.records import environment, schema, store
from tprimat.train import startup

startup.pause_garbage_collection()
startup.import_torchmetrics()
bootstrap.offer_wgrad_extension()
redirected = bootstrap.redirect_to_cpu()

from tprimat.megatron import training  # noqa: E402

environment.software_versions()
store.adapter(schema.RunRecord)
startup.resume_garbage_collection()  # so that no rank searches what was imported, and copies its pages


def train(plan):
    training.fit(plan, redirected)
