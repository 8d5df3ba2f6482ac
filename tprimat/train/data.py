"""What each step trains on: the same global batch in every layout, cut into this rank's micro-batches, from mock data or text."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from tprimat.core.errors import LaunchError
from tprimat.plan.schema import RunPlan
from tprimat.records.store import cannot_write
from tprimat.train.rank import local_rank

MOCK_TOKENS = 4096
"""Tokens that mock data uses of a larger vocabulary: few enough for a short run to learn which."""
MOCK_NOISE = 0.1
"""Share of mock tokens that follow no rule, so that the loss has a floor above zero."""


@dataclass(frozen=True)
class MockSequences:
    """Seeded arithmetic progressions with noise, without end: after a token, the next one is the same step further on."""

    seed: int
    sequence_tokens: int
    vocabulary: int
    description: str = "mock"

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of one sequence, shape (sequence_tokens + 1,): inputs and, shifted by one, labels."""
        random = np.random.default_rng((self.seed, index))
        used, length = min(self.vocabulary, MOCK_TOKENS), self.sequence_tokens + 1
        start, step = random.integers(used), random.integers(1, 8)
        tokens: NDArray[np.int64] = (start + step * np.arange(length, dtype=np.int64)) % used
        noisy = random.random(length) < MOCK_NOISE
        tokens[noisy] = random.integers(used, size=int(noisy.sum()))
        return tokens


class GlobalBatches(IterableDataset[list[Tensor]]):
    """One item is one optimizer step of this replica: a list of micro-batches of shape (micro_batch, sequence_tokens + 1).

    `place` is the number of this replica, and how many there are.
    """

    def __init__(self, sequences: "Sequences", plan: RunPlan, micro_batch: int, place: tuple[int, int]) -> None:
        super().__init__()
        self.sequences = sequences
        self.rank, self.ranks = place
        self.micro_batch = micro_batch
        self.global_batch = plan.workload.global_batch_sequences
        self.steps = plan.steps

    def __iter__(self) -> Iterator[list[Tensor]]:
        for step in range(self.steps):
            yield [self._micro_batch(step, number) for number in range(self.global_batch // (self.micro_batch * self.ranks))]

    def _micro_batch(self, step: int, number: int) -> Tensor:
        first = step * self.global_batch + (number * self.ranks + self.rank) * self.micro_batch
        rows = [self.sequences.sequence(first + row) for row in range(self.micro_batch)]
        return torch.from_numpy(np.stack(rows))


def open_sequences(plan: RunPlan, vocabulary: int) -> "Sequences":
    """Open the sequences that a plan names."""
    if plan.dataset == "mock":
        return MockSequences(seed=plan.seed, sequence_tokens=plan.workload.sequence_tokens, vocabulary=vocabulary)
    return open_text(plan, vocabulary)


# Text: files -> tokens -> one array of numpy, which the ranks of a machine share.

END_OF_DOCUMENT = 256
MAX_TEXT_BYTES = 256 * 2**20
"""Text beyond this is left out, and the record says so: a benchmark reads far less."""


@dataclass(frozen=True)
class TextSequences:
    """Windows of a token stream, reshuffled in each epoch."""

    stream: NDArray[np.integer]
    seed: int
    sequence_tokens: int
    description: str

    @property
    def windows(self) -> int:
        """Sequences in one epoch."""
        return (len(self.stream) - 1) // self.sequence_tokens

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of one sequence, shape (sequence_tokens + 1,)."""
        epoch, place = divmod(index, self.windows)
        start = int(_order(self.seed, epoch, self.windows)[place]) * self.sequence_tokens
        return self.stream[start : start + self.sequence_tokens + 1].astype(np.int64)


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, windows: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(windows)


Sequences = MockSequences | TextSequences


def open_text(plan: RunPlan, vocabulary: int) -> TextSequences:
    """Open the dataset of a plan's `text:PATH`, whose tokens the first rank of each node writes into the run's folder.

    Text without one whole sequence, or with tokens outside the model's vocabulary, is refused.
    """
    files = text_files(plan.dataset.removeprefix("text:"))
    file = Path(plan.run_directory) / f"tokens-{os.environ.get('GROUP_RANK', '0')}.bin"  # of torchrun's node
    if local_rank() == 0:
        texts = [np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT)) for text in _texts(files)]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(np.concatenate(texts).data)
        except OSError as error:
            raise cannot_write(file, error) from error
    _wait_for_all()
    name = "bytes"
    if sum(one.stat().st_size for one in files) > MAX_TEXT_BYTES:
        name += f", the first {MAX_TEXT_BYTES // 2**20} MiB"
    data = TextSequences(np.memmap(file, np.uint16, "r"), plan.seed, plan.workload.sequence_tokens, f"{plan.dataset} ({name})")
    _wait_for_all()
    if local_rank() == 0:
        file.unlink()  # what is mapped stays
    highest = int(data.stream.max())
    if highest >= vocabulary:
        what = f"The tokens of {plan.dataset} go up to {highest}, but the model knows {vocabulary}."
        raise LaunchError(what, fix="a model with a vocabulary of at least 257")
    if data.windows < 1:
        held = f"{len(data.stream)} token{'s' * (len(data.stream) != 1)}"
        what = f"{plan.dataset} has {held}, fewer than one sequence of {plan.workload.sequence_tokens}."
        raise LaunchError(what, fix="more text, or a shorter --sequence-length")
    return data


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def text_files(source: str) -> list[Path]:
    """Return the files behind text:PATH, sorted; `stdlib` means the sources of Python's standard library."""
    path = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source).expanduser()
    if path.is_file():
        return [path]
    pattern = "*.py" if source == "stdlib" else "**/*"
    files = sorted(file for file in path.glob(pattern) if file.is_file())
    if not files:
        raise LaunchError(f"There is no text at {path}.", fix="--set data=text:FILE_OR_FOLDER, or data=mock")
    return files


def _texts(files: Sequence[Path]) -> Iterator[bytes]:
    left = MAX_TEXT_BYTES
    for file in files:
        with file.open("rb") as opened:
            text = opened.read(left)
        yield text
        left -= len(text)
        if left <= 0:
            return
