"""Which recorded memory of a run is what its tensors took."""

from collections.abc import Sequence
from dataclasses import replace

from tprimat.records.evidence import STEPS_WITHOUT_GRAPHS, captures_layers
from tprimat.records.schema import RunRecord, StepRecord


def ran_from_graphs(run: RunRecord) -> bool:
    """Whether CUDA graphs ran the layers."""
    return captures_layers(run.engine_options)


def steps_without_graphs(run: RunRecord) -> int:
    """Return how many steps came before those that the embedded engine launched as CUDA graphs; 0 for runs without."""
    return STEPS_WITHOUT_GRAPHS if run.engine_options.get("cuda_graphs") is True else 0


def tensor_memory(run: RunRecord, steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Drop the allocated memory of steps that CUDA graphs ran: torch counts what the graphs hold as reserved alone.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#graph-memory-management
    """
    return [replace(step, peak_allocated_bytes=None) for step in steps] if ran_from_graphs(run) else steps
