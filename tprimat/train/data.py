"""What each step trains on: the same global batch whatever the layout, cut into this rank's micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from tprimat.plan.schema import RunPlan
from tprimat.train.text import open_text

MOCK_TOKENS = 4096
"""Tokens that mock data uses of a larger vocabulary: few enough that a short run learns which they are."""
MOCK_NOISE = 0.1
"""Share of mock tokens that follow no rule, so that the loss has a floor above zero."""


class Sequences(Protocol):
    """An endless supply of training sequences, numbered from 0."""

    @property
    def description(self) -> str:
        """What the tokens are, for the record."""
        ...

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Tokens of one sequence, shape (sequence_tokens + 1,): inputs and, shifted by one, labels."""
        ...


@dataclass(frozen=True)
class MockSequences:
    """Seeded arithmetic progressions with noise: after a token, the next one is the same step further on."""

    seed: int
    sequence_tokens: int
    vocabulary: int
    description: str = "mock"

    def sequence(self, index: int) -> NDArray[np.int64]:
        """As the protocol says; a pure function of seed and index."""
        random = np.random.default_rng((self.seed, index))
        used, length = min(self.vocabulary, MOCK_TOKENS), self.sequence_tokens + 1
        start, step = random.integers(used), random.integers(1, 8)
        tokens: NDArray[np.int64] = (start + step * np.arange(length, dtype=np.int64)) % used
        noisy = random.random(length) < MOCK_NOISE
        tokens[noisy] = random.integers(used, size=int(noisy.sum()))
        return tokens


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands among the replicas, and among the ranks that share a sequence."""

    data_rank: int
    data_ranks: int


class GlobalBatches(IterableDataset[list[Tensor]]):
    """One item is one optimizer step of this replica: a list of micro-batches of shape (micro_batch, sequence_tokens + 1)."""

    def __init__(self, sequences: Sequences, plan: RunPlan, micro_batch: int, place: RankPlace) -> None:
        super().__init__()
        self.sequences = sequences
        self.place = place
        self.micro_batch = micro_batch
        self.global_batch = plan.batch.global_batch_sequences
        self.steps = plan.steps

    def __iter__(self) -> Iterator[list[Tensor]]:
        # One more than is trained on: a loader that runs out stops its process, and the last step would wait for that.
        for step in range(self.steps + 1):
            yield [self._micro_batch(step, number) for number in range(self.global_batch // self._stride)]

    @property
    def _stride(self) -> int:
        return self.micro_batch * self.place.data_ranks

    def _micro_batch(self, step: int, number: int) -> Tensor:
        first = step * self.global_batch + number * self._stride + self.place.data_rank * self.micro_batch
        rows = [self.sequences.sequence(first + row) for row in range(self.micro_batch)]
        return torch.from_numpy(np.stack(rows))


def open_sequences(plan: RunPlan, vocabulary: int) -> Sequences:
    """The sequences that a plan names.

    Raises:
        LaunchError: the text cannot be read, is too short, or has tokens that the model does not know.
    """
    if plan.dataset == "mock":
        return MockSequences(seed=plan.seed, sequence_tokens=plan.batch.sequence_tokens, vocabulary=vocabulary)
    return open_text(plan, vocabulary)
