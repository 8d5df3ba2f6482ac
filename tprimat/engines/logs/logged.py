"""What a log says of one step, as an object while lines may still add to it, and as a row of numbers afterwards."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tprimat.engines.base import LineFields
from tprimat.record.steps import ABSENT

LOGGED_ROW = np.dtype(
    [
        ("step", "i8"),
        ("seconds", "f8"),
        ("mean_since_reset", "?"),
        ("tokens_per_second_per_gpu", "f8"),
        ("sequences_per_second", "f8"),
        ("loss", "f8"),
        ("grad_norm", "f8"),
        ("learning_rate", "f8"),
        ("batch", "i8"),
        ("finite", "?"),
        ("allocated", "i8"),
        ("reserved", "i8"),
    ]
)
LARGEST = 2**53
"""Whole numbers above it are torn text, no count of anything."""


@dataclass(slots=True, kw_only=True)
class LoggedStep:
    """What the log says of one step. None: nothing."""

    step: int
    seconds: float | None = None
    mean_since_reset: bool = False
    tokens_per_second_per_gpu: float | None = None
    sequences_per_second: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    batch: int | None = None
    failed: bool = False
    """The framework skipped the update or counted a NaN."""
    allocated: int | None = None
    reserved: int | None = None

    def add(self, said: LineFields) -> None:
        """Fill what is not known yet; the larger peak counts, since each rank may report its own."""
        if self.seconds is None:
            self.seconds, self.mean_since_reset = said.step_seconds, said.mean_since_reset
        if self.tokens_per_second_per_gpu is None:
            self.tokens_per_second_per_gpu = said.tokens_per_second_per_gpu
        if self.sequences_per_second is None:
            self.sequences_per_second = said.sequences_per_second
        if self.loss is None:
            self.loss = said.loss
        if self.grad_norm is None:
            self.grad_norm = said.grad_norm
        if self.learning_rate is None:
            self.learning_rate = said.learning_rate
        if self.batch is None:
            self.batch = said.global_batch_sequences
        self.failed = self.failed or bool(said.skipped_steps) or bool(said.nan_steps)
        self.allocated = larger(self.allocated, said.peak_allocated_bytes)
        self.reserved = larger(self.reserved, said.peak_reserved_bytes)

    def repeats(self, said: LineFields) -> bool:
        """Whether a line says again what is known: the same time, or where there is none the same loss and rate."""
        return (
            (said.step_seconds is None or _same(said.step_seconds, self.seconds))
            and (said.loss is None or _same(said.loss, self.loss))
            and (said.tokens_per_second_per_gpu is None or _same(said.tokens_per_second_per_gpu, self.tokens_per_second_per_gpu))
        )

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm, where the log has them, are finite and the update was made."""
        return not self.failed and all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))

    def row(self) -> tuple[Any, ...]:
        """In the order of LOGGED_ROW. A value that is not finite is absent; `finite` tells of it."""
        return (
            self.step,
            _number(self.seconds),
            self.mean_since_reset,
            _number(self.tokens_per_second_per_gpu),
            _number(self.sequences_per_second),
            _number(self.loss),
            _number(self.grad_norm),
            _number(self.learning_rate),
            _count(self.batch),
            self.finite,
            _count(self.allocated),
            _count(self.reserved),
        )


def logged_step(row: Any) -> LoggedStep:
    """From a row."""
    step, seconds, mean, tokens, sequences, loss, norm, rate, batch, finite, allocated, reserved = row.item()
    values = (None if math.isnan(value) else value for value in (seconds, tokens, sequences, loss, norm, rate))
    seconds, tokens, sequences, loss, norm, rate = values
    counts = (None if value == ABSENT else value for value in (batch, allocated, reserved))
    batch, allocated, reserved = counts
    return LoggedStep(
        step=step,
        seconds=seconds,
        mean_since_reset=mean,
        tokens_per_second_per_gpu=tokens,
        sequences_per_second=sequences,
        loss=loss,
        grad_norm=norm,
        learning_rate=rate,
        batch=batch,
        failed=not finite,
        allocated=allocated,
        reserved=reserved,
    )


def larger(left: int | None, right: int | None) -> int | None:
    """The larger of what is known."""
    if left is None or right is None:
        return right if left is None else left
    return max(left, right)


def _same(new: float, old: float | None) -> bool:
    return old is not None and (new == old or (math.isnan(new) and math.isnan(old)))


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _count(value: int | None) -> int:
    return value if value is not None and abs(value) < LARGEST else ABSENT
