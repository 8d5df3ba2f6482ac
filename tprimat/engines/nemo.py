"""NeMo 2's pre-training recipes, on CUDA."""

from tprimat.engines.worker import WorkerEngine

ENGINE = WorkerEngine("nemo")
