"""Megatron-Core is imported with its CUDA calls redirected, as in tests/train."""

from tprimat.megatron import bootstrap

bootstrap.redirect_to_cpu()
