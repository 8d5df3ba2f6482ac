"""The fields of one line of a training log."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFields:
    """What one line of a training log states. None: not on this line. Units are SI, whatever the log prints."""

    step: int | None = None
    total_steps: int | None = None
    step_seconds: float | None = None
    mean_since_reset: bool = False
    """The time is a mean over all steps since the framework last reset its timer, as Megatron-LM prints."""
    tokens_per_second_per_gpu: float | None = None
    sequences_per_second: float | None = None
    """All ranks together."""
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    global_batch_sequences: int | None = None
    skipped_steps: int | None = None
    nan_steps: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    """All memory in use on the device, including that of other processes. Not a peak of this run."""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """Field of records.schema.Evidence -> value, where the line shows what the framework runs."""
    accelerator: str | None = None
    finished: bool = False
    """The line states that training is done."""
