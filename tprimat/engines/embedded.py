"""The embedded engine: Megatron-Core under a Lightning Trainer, on a CPU, CUDA or ROCm."""

from tprimat.engines.worker import WorkerEngine

ENGINE = WorkerEngine("megatron")
