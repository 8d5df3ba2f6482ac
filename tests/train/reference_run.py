"""A short training of the tiny Qwen over two tensor ranks, whose losses every known version of Megatron-Core must give."""

MODEL = "qwen"
TENSOR_RANKS = 2
STEPS = 3
SETTINGS = {
    "training.data.micro_batch_size": 1,
    "training.optimizer.warmup_steps": 1,
    "training.optimizer.learning_rate": 3e-3,
    "training.optimizer.min_learning_rate": 3e-4,
    "experiment.seed": 1234,
}
WORKLOAD = {
    "training.duration.max_steps": STEPS,
    "training.data.global_batch_size": 4,
    "training.data.sequence_length": 32,
    "training.data.dataset": "mock",
    "hardware.platforms.cpu.gpus_per_node": TENSOR_RANKS,
    "parallelism.minimal_communication.qwen.cpu.tensor_model_parallel_size": TENSOR_RANKS,
}
ALL_SETTINGS = {**SETTINGS, **WORKLOAD}
LOSSES = [6.2325098514556885, 6.2470383644104, 6.2599276304244995]
GRAD_NORMS = [7.311108057291358, 5.155243746510683, 2.6002268985631294]
"""Recorded with Megatron-Core 0.16.1."""
