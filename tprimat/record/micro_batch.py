"""How the largest micro-batch that fits was found, where `micro_batch_size: auto` was asked for."""

from dataclasses import dataclass
from typing import Any, ClassVar

REFUSE_UNKNOWN_KEYS: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchTrial:
    """One size, tried in a training step with the real model and optimizer."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    micro_batch_sequences: int
    peak_bytes: int | None
    """Allocated at most in the step, on the worst rank; None: a rank ran out of memory."""
    limit_bytes: int | None
    """What training may allocate on the rank that has least; None: it ran out before the limit was read."""

    @property
    def fits(self) -> bool:
        """Whether a run may take this size."""
        return self.peak_bytes is not None and self.limit_bytes is not None and self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSearch:
    """What was tried, and what came of it. The size that was found stands in the plan's batch and in the record."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    candidates: tuple[int, ...]
    """Sizes that divide the batch, the smallest first."""
    kept_free: float
    """Share 0..1 of the memory that the limits leave out, for what the allocator cannot use and later steps may add."""
    trials: tuple[MicroBatchTrial, ...]
    """In the order in which they were made."""
    predicted_bytes: dict[int, int]
    """Size -> what it would allocate, for larger ones that were not tried: on the line through the two largest that were."""
