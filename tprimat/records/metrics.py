"""Metrics of a run, which only analyze/metrics.py computes. Plain data, SI units, None where a value is absent."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from tprimat.records.schema import REFUSE_UNKNOWN_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its spread."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    value: float
    low: float | None
    """Lower end of the 95 % interval; None for a single sample."""
    high: float | None
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steady steps of a run, including both ends, and what was left out."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    first_step: int
    last_step: int
    steps: int
    outliers: int
    """Steps inside the window more than 3 scaled MAD from the median. Throughput includes them."""
    rule: str
    """Why the window starts where it does, in words."""
    drift_per_step: float | None = None
    """Relative change of step time per step where a trend test is significant at 5 %, else None."""
    left_out: tuple[int, ...] = ()
    """Steps inside the window that do not count because they were profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The metrics of a run and its steps."""

    __pydantic_config__: ClassVar = REFUSE_UNKNOWN_KEYS

    window: Window
    step_seconds: Estimate
    """Median step time with its 95 % interval."""
    mean_step_seconds: float
    """sum(step_seconds) / steps, the basis of throughput."""
    steps_per_second: float
    step_seconds_mad: float
    """Scaled median absolute deviation of the step times."""
    tokens_per_second: float | None
    tokens_per_second_per_gpu: Estimate | None
    flop_per_token: float | None
    flops_convention: Literal["causal", "full", "6n"]
    model_flops_per_second_per_gpu: Estimate | None
    peak_dense_flops: float | None
    mfu: Estimate | None
    mfu_absent_because: str | None
    share_of_measured_gemm: float | None = None
    measured_gemm_flops: float | None = None
    """FLOP/s of one accelerator: the fastest matmul probed there in the run's dtype."""
    peak_memory_bytes: int | None
    """Peak allocated on the worst rank inside the window."""
    peak_reserved_bytes: int | None = None
    final_loss: float | None
    joules_per_token: float | None = None
    cost_per_million_tokens: float | None = None
    warnings: tuple[str, ...] = ()
