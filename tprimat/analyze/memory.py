"""Which recorded memory of a run is what its tensors took."""

from collections.abc import Sequence
from dataclasses import replace

from tprimat.records.schema import RunRecord, StepRecord

GRAPH_OPTIONS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
"""Options of NeMo and Megatron-LM under which CUDA graphs ran the layers."""


def ran_from_graphs(run: RunRecord) -> bool:
    """Whether CUDA graphs ran the layers."""
    return any(run.engine_options.get(name) not in {None, False, "none"} for name in GRAPH_OPTIONS)


def tensor_memory(run: RunRecord, steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Drop the allocated memory of steps that CUDA graphs ran: torch counts what the graphs hold as reserved alone.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#graph-memory-management
    """
    return [replace(step, peak_allocated_bytes=None) for step in steps] if ran_from_graphs(run) else steps
