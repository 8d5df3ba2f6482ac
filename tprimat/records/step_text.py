"""The lists of a benchmark file as JSON text, block by block, as json.dumps(indent=2) would write them."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tprimat.records.schema import StepRecord
from tprimat.records.steps import ABSENT, STEP_ROW, blocks_of
from tprimat.records.table import Rows

RAW_LISTS = {
    "raw_step_times": "step_seconds",
    "raw_loss_values": "loss",
    "raw_memory_values": "peak_allocated_bytes",
    "raw_learning_rates": "learning_rate",
}
"""Key of the file -> field of StepRecord."""
GB = 1e9


def texts(document: dict[str, Any], steps: Sequence[StepRecord]) -> Iterator[str]:
    """The text of a document whose lists of steps are still empty, with the lists filled in."""
    rest = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if len(steps):
        for key in (*RAW_LISTS, "steps"):
            before, found, rest = rest.partition(f'\n  "{key}": []')
            yield before + found[:-1]
            yield from _items(steps, _objects if key == "steps" else _numbers(key))
            yield "\n  ]"
    yield rest


def _items(steps: Sequence[StepRecord], write: Callable[[Rows], str]) -> Iterator[str]:
    separator = "\n"
    for block in blocks_of(steps):
        yield separator + write(block)
        separator = ",\n"


def _numbers(key: str) -> Callable[[Rows], str]:
    name = RAW_LISTS[key]

    def write(block: Rows) -> str:
        cells = _cells(block[name] if key != "raw_memory_values" else _in_gb(block[name]))
        return "    " + ",\n    ".join([cells] * len(block) if isinstance(cells, str) else cells)

    return write


def _in_gb(values: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(values == ABSENT, np.nan, values / GB)


def _objects(block: Rows) -> str:
    columns = {name: _cells(block[name]) for name in STEP_ROW.names or ()}
    fields = [f'      "{name}": {cells if isinstance(cells, str) else "%s"}' for name, cells in columns.items()]
    template = "    {\n" + ",\n".join(fields) + "\n    }"
    varying = [cells for cells in columns.values() if not isinstance(cells, str)]
    return ",\n".join(map(template.__mod__, zip(*varying, strict=True))) if varying else ",\n".join([template] * len(block))


def _cells(values: NDArray[Any]) -> list[str] | str:
    """JSON of every value; one text where all are the same."""
    if (values == values[0]).all() or (values.dtype.kind == "f" and np.isnan(values).all()):
        return _cell(values[0].item())
    if values.dtype.kind != "b" and not (np.isnan(values) if values.dtype.kind == "f" else values == ABSENT).any():
        return list(map(repr, values.tolist()))
    return list(map(_cell, values.tolist()))


def _cell(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    absent = math.isnan(value) if isinstance(value, float) else value == ABSENT
    return "null" if absent else repr(value)
