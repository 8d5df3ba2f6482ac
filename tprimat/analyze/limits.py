"""How far a configuration is from what its machine can give."""

from dataclasses import dataclass
from typing import Literal

from tprimat.analyze.groups import Group, group_estimate

NEAR_A_LIMIT = 0.9
"""Share of a limit from which on it is said to bind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of the machine, and the share of it that is used. Absent where either is not known."""

    kind: Literal["peak", "measured matmul", "memory"]
    share: float
    """0..1 of the limit; above 1 only where a limit was measured too low."""
    size: float | None = None
    """FLOP/s of one GPU, or bytes of one GPU."""

    @property
    def binds(self) -> bool:
        """Whether there is next to no room left."""
        return self.share >= NEAR_A_LIMIT


def limits(group: Group) -> tuple[Limit, ...]:
    """What is known of a group's distance from its limits: compute first, memory last."""
    metrics = [item.metrics for item in group.runs if item.metrics is not None]
    found = []
    mfu = group_estimate(group, lambda one: one.mfu)
    if mfu is not None:
        found.append(Limit(kind="peak", share=mfu.value, size=metrics[0].peak_dense_flops))
    shares = [one.share_of_measured_gemm for one in metrics if one.share_of_measured_gemm is not None]
    if shares:
        found.append(Limit(kind="measured matmul", share=sum(shares) / len(shares)))
    peaks = [one.peak_memory_bytes for one in metrics if one.peak_memory_bytes is not None]
    size = group.run.machine.memory_bytes
    if peaks and size:
        found.append(Limit(kind="memory", share=max(peaks) / size, size=float(size)))
    return tuple(found)
