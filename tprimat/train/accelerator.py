"""The machine as torch sees it from inside a rank."""

import os

import torch

from tprimat.record.environment import processor_name
from tprimat.record.schema import Machine


def describe_machine(nodes: int, gpus_per_node: int) -> Machine:
    """The accelerator of this rank, or the processor where there is none."""
    if not torch.cuda.is_available():
        return Machine(platform="cpu", accelerator=processor_name(), gpus_per_node=gpus_per_node, nodes=nodes)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        platform="rocm" if torch.version.hip else "cuda",
        accelerator=properties.name,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        memory_bytes=properties.total_memory,
    )


def local_rank() -> int:
    """Of torchrun; 0 for a process that nobody started in a group."""
    return int(os.environ.get("LOCAL_RANK", "0"))
