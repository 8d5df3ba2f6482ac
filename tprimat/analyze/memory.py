"""Which recorded memory of a run is what its tensors took."""

from collections.abc import Sequence
from dataclasses import replace

from tprimat.records.evidence import captures_layers
from tprimat.records.schema import RunRecord, StepRecord


def ran_from_graphs(run: RunRecord) -> bool:
    """Whether CUDA graphs ran the layers."""
    return captures_layers(run.engine_options)


def tensor_memory(run: RunRecord, steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Drop the allocated memory of steps that CUDA graphs ran: torch counts what the graphs hold as reserved alone.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#graph-memory-management
    """
    return [replace(step, peak_allocated_bytes=None) for step in steps] if ran_from_graphs(run) else steps
