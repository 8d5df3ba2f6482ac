"""Prepare pytest's own process as a rank is prepared before it imports Megatron-Core: parts of the engine are tested in it."""

from tprimat.megatron import bootstrap
from tprimat.train import startup

startup.import_torchmetrics()
bootstrap.offer_wgrad_extension()
bootstrap.redirect_to_cpu()
