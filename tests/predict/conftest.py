"""Megatron-Core is imported with its CUDA calls redirected, as in tests/train, and torchmetrics before it."""

from tprimat.megatron import bootstrap
from tprimat.train import startup

startup.import_torchmetrics()
bootstrap.redirect_to_cpu()
