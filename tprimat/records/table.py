"""Millions of rows of numbers in little memory: constant columns and counters cost nothing, the rest may go to disk."""

import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tprimat.errors import RecordError

Rows = NDArray[Any]
"""Structured; one field a column."""

BLOCK = 1 << 15
KEPT_BYTES = 4 << 20
"""Of columns that vary; what comes after goes into a temporary file."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One column of one block: an arithmetic series, an array, or a place in the temporary file."""

    first: Any = None
    stride: int = 0
    values: NDArray[Any] | None = None
    offset: int | None = None


class Table:
    """Rows in blocks, appended in order. The last block is open and can be any size up to BLOCK."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._blocks: list[dict[str, _Piece]] = []
        self._heads: list[Rows] = []
        self._sizes: list[int] = []
        self._open = np.empty(BLOCK, dtype)
        self._filled = 0
        self._in_memory = 0
        self._cached: tuple[int, Rows] | None = None
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return sum(self._sizes) + self._filled

    def append(self, rows: Rows) -> None:
        """Add rows at the end.

        Raises:
            RecordError: the temporary file cannot be written.
        """
        start = 0
        while start < len(rows):
            taken = min(BLOCK - self._filled, len(rows) - start)
            self._open[self._filled : self._filled + taken] = rows[start : start + taken]
            self._filled, start = self._filled + taken, start + taken
            if self._filled == BLOCK:
                self._close()

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows."""
        while self._sizes and len(self) - self._filled >= length:
            self._open[: self._sizes[-1]] = self._restore(len(self._sizes) - 1)
            self._filled = self._sizes.pop()
            self._blocks.pop()
            self._heads.pop()
        self._filled -= max(0, len(self) - length)
        self._cached = None

    def row(self, index: int) -> Rows:
        """One row, shape (1,); a copy."""
        number, place = divmod(index, BLOCK)
        row: Rows = self._restored(number)[place : place + 1].copy()
        return row

    def replace(self, index: int, row: Rows) -> None:
        """Put another row in the place of one."""
        number, place = divmod(index, BLOCK)
        if number == len(self._sizes):
            self._open[place : place + 1] = row
            return
        rows = self._restored(number)
        rows[place : place + 1] = row
        self._blocks[number] = self._pieces(rows)
        self._heads[number] = rows[:1].copy()

    def search(self, name: str, value: float) -> int:
        """How many rows are below the value in a column that rises."""
        if not len(self):
            return 0
        heads = [head[name][0] for head in (*self._heads, self._open[: min(1, self._filled)]) if len(head)]
        number = max(0, bisect_left(heads, value) - 1)
        return number * BLOCK + int(np.searchsorted(self._restored(number)[name], value))

    def block(self, index: int) -> Rows:
        """One block; the open one is a view that later rows may change."""
        return self._restore(index) if index < len(self._sizes) else self._open[: self._filled]

    def blocks(self) -> Iterator[Rows]:
        """All rows."""
        for index in range(len(self._sizes) + bool(self._filled)):
            yield self.block(index)

    def column(self, name: str) -> NDArray[Any]:
        """One column as a whole."""
        whole = np.empty(len(self), self.dtype[name])
        start = 0
        for index, size in enumerate(self._sizes):
            whole[start : start + size] = self._values(self._blocks[index][name], self.dtype[name], size)
            start += size
        whole[start:] = self._open[name][: self._filled]
        return whole

    def _close(self) -> None:
        self._blocks.append(self._pieces(self._open))
        self._heads.append(self._open[:1].copy())
        self._sizes.append(self._filled)
        self._filled = 0

    def _pieces(self, rows: Rows) -> dict[str, _Piece]:
        return {name: self._piece(np.ascontiguousarray(rows[name])) for name in self.dtype.names or ()}

    def _restored(self, number: int) -> Rows:
        """A block, kept for the next call: looking up row after row restores it once."""
        if number == len(self._sizes):
            return self._open[: self._filled]
        if self._cached is None or self._cached[0] != number:
            self._cached = number, self._restore(number)
        return self._cached[1]

    def _piece(self, values: NDArray[Any]) -> _Piece:
        if (values == values[0]).all() or (values.dtype.kind == "f" and np.isnan(values).all()):
            return _Piece(first=values[0])
        if values.dtype.kind == "i" and (np.diff(values) == values[1] - values[0]).all():
            return _Piece(first=values[0], stride=int(values[1] - values[0]))
        if self._in_memory + values.nbytes <= KEPT_BYTES:
            self._in_memory += values.nbytes
            return _Piece(values=values)
        return _Piece(offset=self._spill(values))

    def _spill(self, values: NDArray[Any]) -> int:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="tprimat-")  # noqa: SIM115, as long as the table lives
            offset = self._file.seek(0, 2)
            self._file.write(values.tobytes())
        except OSError as error:
            folder = tempfile.gettempdir()
            raise RecordError(
                f"{folder} has no room for a table of {len(self)} steps: {error.strerror or error}.",
                where=folder,
                fix="free space, or set TMPDIR to another folder",
            ) from error
        return offset

    def _restore(self, index: int) -> Rows:
        rows = np.empty(self._sizes[index], self.dtype)
        for name, piece in self._blocks[index].items():
            rows[name] = self._values(piece, self.dtype[name], len(rows))
        return rows

    def _values(self, piece: _Piece, dtype: np.dtype[Any], size: int) -> Any:
        if piece.values is not None:
            return piece.values
        if piece.offset is None or self._file is None:
            return piece.first + piece.stride * np.arange(size) if piece.stride else piece.first
        self._file.seek(piece.offset)
        return np.frombuffer(self._file.read(size * dtype.itemsize), dtype)
