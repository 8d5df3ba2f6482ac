"""Real text as training data: files -> tokens -> Megatron's indexed dataset (.bin/.idx), made once and memory-mapped."""

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path
from numpy.typing import NDArray

from tprimat.errors import LaunchError
from tprimat.plan.schema import RunPlan
from tprimat.train.device import local_rank

END_OF_DOCUMENT = 256
"""Byte-level token after each file; bytes are their own tokens 0..255."""
MOST_BYTES = 256 * 2**20
"""Text beyond it is left out, and the record says so: a benchmark reads far less."""
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
"""What tokenizers call the token after each file: Llama 3's, Qwen's and GPT's, Llama 2's, Gemma's."""


@dataclass(frozen=True)
class TextSequences:
    """Windows of a token stream, in an order that is shuffled anew each epoch."""

    prefix: Path
    seed: int
    sequence_tokens: int
    description: str

    @cached_property
    def _dataset(self) -> IndexedDataset:
        return IndexedDataset(str(self.prefix), mmap=True)

    @cached_property
    def tokens(self) -> int:
        """Length of the stream; one document holds all of it, so that a window is one memory-mapped slice."""
        return int(self._dataset.sequence_lengths[0])

    @property
    def windows(self) -> int:
        """Sequences in one epoch."""
        return (self.tokens - 1) // self.sequence_tokens

    def highest_token(self) -> int:
        """Reads everything once."""
        return int(self._dataset.get(0).max())

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Tokens of one sequence, shape (sequence_tokens + 1,)."""
        epoch, place = divmod(index, self.windows)
        start = int(self._order(epoch)[place]) * self.sequence_tokens
        window = self._dataset.get(0, offset=start, length=self.sequence_tokens + 1)
        return np.asarray(window, dtype=np.int64)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = np.random.default_rng((self.seed, epoch)).permutation(self.windows)
        return self._orders[epoch]

    @cached_property
    def _orders(self) -> dict[int, NDArray[np.int64]]:
        return {}


def open_text(plan: RunPlan, vocabulary: int) -> TextSequences:
    """The dataset of a plan's `text:PATH`; the first rank of each node makes it where it is not in the cache yet.

    Raises:
        LaunchError: nothing to read, fewer tokens than one sequence, or tokens beyond the model's vocabulary.
    """
    source = plan.dataset.removeprefix("text:")
    prefix, tokenizer = _cached(source, plan.tokenizer)
    if local_rank() == 0 and not Path(get_idx_path(str(prefix))).exists():
        _build(prefix, source, plan.tokenizer)
    if dist.is_initialized():
        dist.barrier()
    data = TextSequences(prefix, plan.seed, plan.batch.sequence_tokens, f"{plan.dataset} ({tokenizer})")
    highest = data.highest_token()
    if highest >= vocabulary:
        what = f"The tokens of {plan.dataset} go up to {highest}, and the model knows {vocabulary}."
        raise LaunchError(what, fix="another tokenizer.json in training.data.tokenizer, or a larger model")
    if data.windows < 1:
        what = f"{plan.dataset} has {data.tokens} tokens, fewer than one sequence of {plan.batch.sequence_tokens}."
        raise LaunchError(what, fix="more text, or a shorter --sequence-length")
    return data


def text_files(source: str) -> list[Path]:
    """The files behind text:PATH, sorted; `stdlib` is the Python standard library's own sources.

    Raises:
        LaunchError: no such path, or an empty folder.
    """
    path = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source).expanduser()
    if path.is_file():
        return [path]
    pattern = "*.py" if source == "stdlib" else "**/*"
    files = sorted(file for file in path.glob(pattern) if file.is_file())
    if not files:
        raise LaunchError(f"There is no text at {path}.", fix="--data text:FILE_OR_FOLDER, or --data mock")
    return files


def _cached(source: str, tokenizer: str | None) -> tuple[Path, str]:
    """Where the dataset of exactly this content belongs, and the tokenizer's name."""
    digest = hashlib.sha256()
    for text in _texts(source):
        digest.update(text)
        digest.update(b"\0")
    name = "bytes"
    if tokenizer is not None:
        digest.update(_read_tokenizer(tokenizer))
        name = Path(tokenizer).name
    if sum(file.stat().st_size for file in text_files(source)) > MOST_BYTES:
        name += f", the first {MOST_BYTES // 2**20} MiB"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tprimat"
    return root / f"text-{digest.hexdigest()[:16]}", name


def _read_tokenizer(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise LaunchError(f"The tokenizer {path} cannot be read: {error.strerror}.", fix="training.data.tokenizer") from error


def _build(prefix: Path, source: str, tokenizer: str | None) -> None:
    """Write the dataset under a temporary name, then move it: another run never sees half of it."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    stream = np.concatenate(list(_encoded(source, tokenizer)))
    with tempfile.TemporaryDirectory(dir=prefix.parent) as folder:
        partial = str(Path(folder) / "part")
        builder = IndexedDatasetBuilder(get_bin_path(partial), dtype=np.int32 if stream.max() > 65535 else np.uint16)
        builder.add_item(torch.from_numpy(stream.astype(np.int64)))
        builder.end_document()
        builder.finalize(get_idx_path(partial))
        Path(get_bin_path(partial)).replace(get_bin_path(str(prefix)))
        Path(get_idx_path(partial)).replace(get_idx_path(str(prefix)))


def _texts(source: str) -> Iterator[bytes]:
    """The contents of each file, up to MOST_BYTES in all."""
    left = MOST_BYTES
    for file in text_files(source):
        with file.open("rb") as opened:
            text = opened.read(left)
        yield text
        left -= len(text)
        if left <= 0:
            return


def _encoded(source: str, tokenizer: str | None) -> Iterator[NDArray[np.int32]]:
    encode = _byte_tokens if tokenizer is None else _trained_tokens(tokenizer)
    return map(encode, _texts(source))


def _byte_tokens(text: bytes) -> NDArray[np.int32]:
    return np.append(np.frombuffer(text, dtype=np.uint8).astype(np.int32), np.int32(END_OF_DOCUMENT))


def _trained_tokens(path: str) -> Callable[[bytes], NDArray[np.int32]]:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise LaunchError("A tokenizer.json needs the package tokenizers.", fix="pip install tokenizers") from error
    tokenizer = Tokenizer.from_file(path)
    end = next((number for name in ENDS if (number := tokenizer.token_to_id(name)) is not None), None)

    def encode(text: bytes) -> NDArray[np.int32]:
        numbers = tokenizer.encode(text.decode("utf8", errors="replace")).ids
        return np.asarray(numbers if end is None else [*numbers, end], dtype=np.int32)

    return encode
