"""What each step trains on: the same global batch in every layout, cut into this rank's micro-batches, from mock data or text."""

import hashlib
import os
import re
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from tprimat.core.errors import LaunchError
from tprimat.plan.build import WORDS
from tprimat.plan.schema import RunPlan
from tprimat.train.device import local_rank

MOCK_TOKENS = 4096
"""Tokens that mock data uses of a larger vocabulary: few enough for a short run to learn which."""
MOCK_NOISE = 0.1
"""Share of mock tokens that follow no rule, so that the loss has a floor above zero."""


class Sequences(Protocol):
    """An endless supply of training sequences, numbered from 0."""

    @property
    def description(self) -> str:
        """Name of the data, for the record."""
        ...

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of one sequence, shape (sequence_tokens + 1,): inputs and, shifted by one, labels."""
        ...


@dataclass(frozen=True)
class MockSequences:
    """Seeded arithmetic progressions with noise: after a token, the next one is the same step further on."""

    seed: int
    sequence_tokens: int
    vocabulary: int
    description: str = "mock"

    def sequence(self, index: int) -> NDArray[np.int64]:
        """See Sequences; a pure function of seed and index."""
        random = np.random.default_rng((self.seed, index))
        used, length = min(self.vocabulary, MOCK_TOKENS), self.sequence_tokens + 1
        start, step = random.integers(used), random.integers(1, 8)
        tokens: NDArray[np.int64] = (start + step * np.arange(length, dtype=np.int64)) % used
        noisy = random.random(length) < MOCK_NOISE
        tokens[noisy] = random.integers(used, size=int(noisy.sum()))
        return tokens


@dataclass(frozen=True)
class RankPlace:
    """The place of this rank among the replicas."""

    data_rank: int
    data_ranks: int


class GlobalBatches(IterableDataset[list[Tensor]]):
    """One item is one optimizer step of this replica: a list of micro-batches of shape (micro_batch, sequence_tokens + 1)."""

    def __init__(self, sequences: Sequences, plan: RunPlan, micro_batch: int, place: RankPlace) -> None:
        super().__init__()
        self.sequences = sequences
        self.place = place
        self.micro_batch = micro_batch
        self.global_batch = plan.workload.global_batch_sequences
        self.steps = plan.steps

    def __iter__(self) -> Iterator[list[Tensor]]:
        for step in range(self.steps):
            yield [self._micro_batch(step, number) for number in range(self.global_batch // self._stride)]

    @property
    def _stride(self) -> int:
        return self.micro_batch * self.place.data_ranks

    def _micro_batch(self, step: int, number: int) -> Tensor:
        first = step * self.global_batch + number * self._stride + self.place.data_rank * self.micro_batch
        rows = [self.sequences.sequence(first + row) for row in range(self.micro_batch)]
        return torch.from_numpy(np.stack(rows))


def open_sequences(plan: RunPlan, vocabulary: int) -> Sequences:
    """Open the sequences that a plan names.

    Raises:
        LaunchError: the text cannot be read, is too short, or has tokens outside the model's vocabulary.
    """
    if plan.dataset == "mock":
        return MockSequences(seed=plan.seed, sequence_tokens=plan.workload.sequence_tokens, vocabulary=vocabulary)
    return open_text(plan, vocabulary)


# Text: files -> tokens -> one array of numpy, written once and memory-mapped.

END_OF_DOCUMENT = 256
"""Byte-level token after each file; bytes are their own tokens 0..255."""
WORD = re.compile(rb" ?[A-Za-z_]+|[0-9]|\n +|.", re.DOTALL)
"""A word with the space before it, a digit, the beginning of an indented line, or any other byte."""
FIRST_WORD = END_OF_DOCUMENT + 1
MOST_WORD_TOKENS = 32_768
MAX_TEXT_BYTES = 256 * 2**20
"""Text beyond this is left out, and the record says so: a benchmark reads far less."""
END_OF_TEXT_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
"""Names of the token after each file: in the tokenizers of Llama 3, of Qwen and GPT, of Llama 2, of Gemma."""

Encoder = Callable[[bytes], NDArray[np.int32]]


@dataclass(frozen=True)
class TextSequences:
    """Windows of a token stream, reshuffled in each epoch."""

    file: Path
    seed: int
    sequence_tokens: int
    description: str

    @cached_property
    def stream(self) -> NDArray[np.integer]:
        """All tokens, memory-mapped."""
        stream: NDArray[np.integer] = np.load(self.file, mmap_mode="r")
        return stream

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


def open_text(plan: RunPlan, vocabulary: int) -> TextSequences:
    """Open the dataset of a plan's `text:PATH`; the first rank of each node builds it where it is not cached.

    A cache that cannot be written is replaced by the run's folder.

    Raises:
        LaunchError: nothing to read, fewer tokens than one sequence, or tokens outside the model's vocabulary.
    """
    source, most = plan.dataset.removeprefix("text:"), min(vocabulary, MOST_WORD_TOKENS)
    cached, tokenizer = _cached(source, plan.tokenizer, most)
    places = (cached, Path(plan.run_directory) / cached.name)
    if local_rank() == 0 and not any(map(_exists, places)):
        stream = np.concatenate(list(map(_encoder(source, plan.tokenizer, most), _texts(source))))
        _write_somewhere(places, stream.astype(np.int32 if stream.max() > 65535 else np.uint16), source)
    if dist.is_initialized():
        dist.barrier()
    data = TextSequences(
        next(filter(_exists, places), cached), plan.seed, plan.workload.sequence_tokens, f"{plan.dataset} ({tokenizer})"
    )
    highest = int(data.stream.max())
    if highest >= vocabulary:
        what = f"The tokens of {plan.dataset} go up to {highest}, and the model knows {vocabulary}."
        raise LaunchError(what, fix="another tokenizer.json in training.data.tokenizer, or a larger model")
    if data.windows < 1:
        held = f"{len(data.stream)} token{'s' * (len(data.stream) != 1)}"
        what = f"{plan.dataset} has {held}, fewer than one sequence of {plan.workload.sequence_tokens}."
        raise LaunchError(what, fix="more text, or a shorter --sequence-length")
    return data


def text_files(source: str) -> list[Path]:
    """Return the files behind text:PATH, sorted; `stdlib` means the sources of Python's standard library.

    Raises:
        LaunchError: no such path, or an empty folder.
    """
    path = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source).expanduser()
    if path.is_file():
        return [path]
    pattern = "*.py" if source == "stdlib" else "**/*"
    files = sorted(file for file in path.glob(pattern) if file.is_file())
    if not files:
        raise LaunchError(f"There is no text at {path}.", fix="--set data=text:FILE_OR_FOLDER, or data=mock")
    return files


def _texts(source: str) -> Iterator[bytes]:
    """Yield the contents of each file, up to MAX_TEXT_BYTES in all."""
    left = MAX_TEXT_BYTES
    for file in text_files(source):
        with file.open("rb") as opened:
            text = opened.read(left)
        yield text
        left -= len(text)
        if left <= 0:
            return


def _cached(source: str, tokenizer: str | None, most: int) -> tuple[Path, str]:
    """Return the cache file for exactly this content, and the tokenizer's name."""
    digest = hashlib.sha256()
    for text in _texts(source):
        digest.update(text)
        digest.update(b"\0")
    name = "bytes"
    if tokenizer == WORDS:
        name = f"{WORDS}, at most {most:,}"
        digest.update(name.encode())
    elif tokenizer is not None:
        try:
            digest.update(Path(tokenizer).read_bytes())
        except OSError as error:
            what = f"The tokenizer {tokenizer} cannot be read: {error.strerror}."
            raise LaunchError(what, fix="training.data.tokenizer") from error
        name = Path(tokenizer).name
    if sum(file.stat().st_size for file in text_files(source)) > MAX_TEXT_BYTES:
        name += f", the first {MAX_TEXT_BYTES // 2**20} MiB"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tprimat"
    return root / f"text-{digest.hexdigest()[:16]}.npy", name


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # a folder that may not be entered
        return False


def _write_somewhere(places: Sequence[Path], stream: NDArray[np.integer], source: str) -> None:
    """Write at the first place that can be written, under a temporary name, so that another run never sees half of it."""
    refused = []
    for file in places:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                np.save(Path(folder) / file.name, stream)
                (Path(folder) / file.name).replace(file)
        except OSError as error:
            refused.append(f"{file.parent}: {error.strerror or error}")
        else:
            return
    raise LaunchError(
        f"The tokens of {source} cannot be stored.", why="; ".join(refused), fix="XDG_CACHE_HOME with a folder that has room"
    )


def _encoder(source: str, tokenizer: str | None, most: int) -> Encoder:
    if tokenizer == WORDS:
        return word_tokens(_texts(source), most)
    return _byte_tokens if tokenizer is None else _trained_tokens(tokenizer)


def _byte_tokens(text: bytes) -> NDArray[np.int32]:
    return np.append(np.frombuffer(text, dtype=np.uint8).astype(np.int32), np.int32(END_OF_DOCUMENT))


def word_tokens(texts: Iterator[bytes], most: int) -> Encoder:
    """Return an encoder with a token for each byte and for the most frequent words of some texts, `most` tokens in all."""
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(word for word in WORD.findall(text) if len(word) > 1)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: max(0, most - FIRST_WORD)]
    numbers = {word: [FIRST_WORD + place] for place, word in enumerate(frequent)}

    def encode(text: bytes) -> NDArray[np.int32]:
        tokens = [number for word in WORD.findall(text) for number in numbers.get(word, word)]
        return np.asarray([*tokens, END_OF_DOCUMENT], dtype=np.int32)

    return encode


def _trained_tokens(path: str) -> Encoder:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise LaunchError("A tokenizer.json needs the package tokenizers.", fix="pip install tokenizers") from error
    tokenizer = Tokenizer.from_file(path)
    end = next((number for name in END_OF_TEXT_TOKENS if (number := tokenizer.token_to_id(name)) is not None), None)

    def encode(text: bytes) -> NDArray[np.int32]:
        numbers = tokenizer.encode(text.decode("utf8", errors="replace")).ids
        return np.asarray(numbers if end is None else [*numbers, end], dtype=np.int32)

    return encode
