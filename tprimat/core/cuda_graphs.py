"""What the embedded engine can launch as CUDA graphs."""

from dataclasses import dataclass
from typing import Literal

Obstacle = Literal["pipeline", "context", "experts", "recompute", "fully_shard", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """What decides whether micro-batches can be launched as CUDA graphs."""

    pipeline: int
    """Ranks that share the layers."""
    context: int
    """Ranks that share a sequence."""
    experts: bool
    """Whether the model has some."""
    recompute: str
    """none, selective or full."""
    fully_shard: bool
    """Whether replicas share the weights."""
    own_layers: bool
    """Whether the layers are the engine's own, not Transformer Engine's."""
    fp8: bool
    """Whether the layers multiply in 8 bits."""

    @property
    def obstacle(self) -> Obstacle | None:
        """The first reason why they cannot be, or have never been; None if they can."""
        reasons: dict[Obstacle, bool] = {
            "pipeline": self.pipeline > 1,
            "context": self.context > 1,
            "experts": self.experts,
            "recompute": self.recompute != "none",
            "fully_shard": self.fully_shard,
            "fp8": self.fp8 and not self.own_layers,
        }
        return next((name for name, applies in reasons.items() if applies), None)
