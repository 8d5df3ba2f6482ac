"""Tables of the models and accelerators: `python3 -m tprimat models`."""

from collections.abc import Sequence
from dataclasses import asdict, fields
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


def select_models(names: Sequence[str], sequence_tokens: int | None) -> list[tuple[ModelShape, int]]:
    """Select models, all where none is named, with the sequence to count FLOP at: 2,048 tokens or the context unless requested.

    Raises:
        ConfigError: no such model, or a sequence that no selected model can read; those whose context is too short are left out.
    """
    shapes = [model_shape(name) for name in names] or list(models().values())
    longest = max(shape.context_tokens for shape in shapes)
    if sequence_tokens is None:
        return [(shape, min(USUAL_SEQUENCE_TOKENS, shape.context_tokens)) for shape in shapes]
    if not 1 <= sequence_tokens <= longest:
        what = f"A sequence of {sequence_tokens} tokens is out of range."
        raise ConfigError(what, where="--sequence", fix=f"1 to {longest:,} tokens")
    return [(shape, sequence_tokens) for shape in shapes if sequence_tokens <= shape.context_tokens]


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


def count_rows(selected: Sequence[tuple[ModelShape, int]]) -> list[Row]:
    """Return parameters, and the FLOP of one token by each convention."""
    return [
        {
            "model": shape.name,
            **asdict(parameters(shape)),
            "sequence_tokens": tokens,
            **{convention: flop_per_token(shape, tokens, convention) for convention in CONVENTIONS},
            "source": shape.source,
        }
        for shape, tokens in selected
    ]


def accelerator_rows() -> list[Row]:
    """Return the data sheets, and the memory that a program may use."""
    return [{**asdict(one), "usable_bytes": one.usable_bytes} for one in accelerators()]


def _scaled(value: float | None, scale: float) -> str:
    return units.ABSENT if value is None else units.significant(value / scale, 4)


def text_of(counts: Sequence[Row], sheets: Sequence[Row], screen: Screen = PLAIN) -> str:
    """Return both tables as text for a terminal; one without rows is left out."""
    flops = [f"{name} GFLOP/token" for name in CONVENTIONS]
    models = [
        [row["model"], *(units.count(row[key]) for key in ("total", "active", "sequence_tokens"))]
        + [_scaled(row[name], 1e9) for name in CONVENTIONS]
        for row in counts
    ]
    devices = [
        [row["name"], *(_scaled(row["dense_flops"].get(dtype), 1e12) for dtype in DTYPES), units.gibibytes(row["usable_bytes"])]
        + [units.si(row[f"{what}_bytes_per_second"], "B/s") for what in ("bandwidth", "link")]
        + [units.count(row["tdp_watts"])]
        for row in sheets
    ]
    peaks = [f"{dtype} TFLOP/s" for dtype in DTYPES]
    dropped = [name for dtype, name in zip(DTYPES, peaks, strict=True) if dtype not in {"bf16", "fp8"}]
    tables = (
        ("Parameters, and FLOP of one token (forward and backward)", ["model", "parameters", "active", "tokens", *flops], models),
        (
            "Dense peaks and memory of one GPU as torch sees it",
            ["accelerator", *peaks, "memory", "bandwidth", "links", "watts"],
            devices,
        ),
    )
    return "\n\n".join(
        f"{screen.prose(title, meaning='heading')}\n\n{columns(header, rows, screen=screen, drop=[*flops[1:], *dropped])}"
        for title, header, rows in tables
        if rows
    )
