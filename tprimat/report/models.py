"""Tables of the models and accelerators: `python3 -m tprimat models`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import yaml

from tprimat.core import units
from tprimat.core.accelerators import DTYPES, accelerators
from tprimat.core.errors import ConfigError
from tprimat.core.flops import CONVENTIONS, flop_per_token, parameters
from tprimat.core.models import ModelShape, model_shape, models
from tprimat.report.tables import PLAIN, Screen, columns

USUAL_SEQUENCE_TOKENS = 2048

Row = dict[str, Any]
Cell = Callable[[Row], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The models that the tables describe."""

    shapes: tuple[ModelShape, ...]
    all_models: bool
    sequence_tokens: int | None

    def sequence(self, shape: ModelShape) -> int:
        """Return the sequence to count FLOP at: as requested, else 2,048 tokens or the model's whole context if shorter."""
        return self.sequence_tokens or min(USUAL_SEQUENCE_TOKENS, shape.context_tokens)


def select_models(names: Sequence[str], sequence_tokens: int | None) -> Selection:
    """Select the models to describe: those named (all when none is), without those whose context is too short.

    Raises:
        ConfigError: no such model, or a sequence that no selected model can read.
    """
    shapes = tuple(model_shape(name) for name in names) or tuple(models().values())
    if sequence_tokens is not None:
        longest = max(shape.context_tokens for shape in shapes)
        if not 1 <= sequence_tokens <= longest:
            raise ConfigError(
                f"A sequence of {sequence_tokens} tokens is out of range.", where="--sequence", fix=f"1 to {longest:,} tokens"
            )
        shapes = tuple(shape for shape in shapes if sequence_tokens <= shape.context_tokens)
    return Selection(shapes=shapes, all_models=not names, sequence_tokens=sequence_tokens)


def template(shape: ModelShape) -> str:
    """Return a model as a section of config.yaml, as the start of one's own."""
    usual = {one.name: one.default for one in fields(ModelShape)}
    own = {name: value for name, value in asdict(shape).items() if value != usual[name] and name not in {"name", "source"}}
    lines = yaml.safe_dump(own, sort_keys=False).splitlines()
    return "\n".join(
        [
            f"# The figures of {shape.name}, to change. In config.yaml, ./benchmark.py --model mine trains it; --parallel, or",
            "# --tp and --pp, choose how it is split. tprimat/core/models.py (ModelShape) explains each key.",
            "models:",
            "  mine:",
            "    name: My model",
            "    architecture:",
            "      name: mine",
            *(f"      {line}" for line in lines),
            "",
        ]
    )


def count_rows(selected: Selection) -> list[Row]:
    """Return parameters, and the FLOP of one token by each convention."""
    return [
        {
            "model": shape.name,
            **asdict(parameters(shape)),
            "sequence_tokens": selected.sequence(shape),
            **{convention: flop_per_token(shape, selected.sequence(shape), convention) for convention in CONVENTIONS},
            "source": shape.source,
        }
        for shape in selected.shapes
    ]


def accelerator_rows(selected: Selection) -> list[Row]:
    """Return the data sheets, and the memory that a program may use; none when only some models are selected."""
    return [{**asdict(one), "usable_bytes": one.usable_bytes} for one in accelerators()] if selected.all_models else []


def _tera(flops: float | None) -> str:
    return units.ABSENT if flops is None else units.significant(flops / 1e12, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table: its rows as numbers, and their cells as text, by heading; the first column has names."""

    title: str
    rows: Callable[[Selection], list[Row]]
    cells: Mapping[str, Cell]
    drop: Sequence[str]
    """Headings in the order in which a narrow terminal loses them."""


TABLES = {
    "counts": Table(
        title="Parameters, and FLOP of one token (forward and backward)",
        rows=count_rows,
        cells={
            "model": lambda row: row["model"],
            "parameters": lambda row: units.count(row["total"]),
            "active": lambda row: units.count(row["active"]),
            "tokens": lambda row: units.count(row["sequence_tokens"]),
            **{
                f"{name} GFLOP/token": lambda row, name=name: units.significant(row[name] / 1e9, 4)  # type: ignore[misc]
                for name in CONVENTIONS
            },
        },
        drop=("6n GFLOP/token", "full GFLOP/token", "tokens"),
    ),
    "accelerators": Table(
        title="Dense peaks and memory of one GPU as torch sees it",
        rows=accelerator_rows,
        cells={
            "accelerator": lambda row: row["name"],
            **{
                f"{dtype} TFLOP/s": lambda row, dtype=dtype: _tera(row["dense_flops"].get(dtype))  # type: ignore[misc]
                for dtype in DTYPES
            },
            "memory": lambda row: units.gibibytes(row["usable_bytes"]),
            "bandwidth": lambda row: units.si(row["bandwidth_bytes_per_second"], "B/s"),
            "links": lambda row: units.si(row["link_bytes_per_second"], "B/s"),
            "watts": lambda row: units.count(row["tdp_watts"]),
        },
        drop=[*(f"{dtype} TFLOP/s" for dtype in DTYPES if dtype not in {"bf16", "fp8"}), "watts"],
    ),
}


def text_of(rows: Mapping[str, Sequence[Row]], screen: Screen = PLAIN) -> str:
    """Return tables, key of TABLES -> rows, as text for a terminal; tables without rows are left out."""
    parts = []
    for name, found in rows.items():
        if found:
            table = TABLES[name]
            body = [[cell(row) for cell in table.cells.values()] for row in found]
            shown = columns(list(table.cells), body, screen=screen, drop=table.drop)
            parts.append(f"{screen.prose(table.title, meaning='heading')}\n\n{shown}")
    return "\n\n".join(parts)
