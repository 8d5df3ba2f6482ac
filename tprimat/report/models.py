"""Tables of the models and accelerators: `python3 -m tprimat models`."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import yaml

from tprimat.core import units
from tprimat.core.accelerators import DTYPES
from tprimat.core.flops import CONVENTIONS, flop_per_token, parameters
from tprimat.core.models import ModelShape
from tprimat.core.published import PublishedResult
from tprimat.report.tables import PLAIN, Screen, columns

USUAL_SEQUENCE_TOKENS = 2048

Row = dict[str, Any]


def template(shape: ModelShape) -> str:
    """Return a model as a section of config.yaml, as the start of one's own."""
    usual = {one.name: one.default for one in fields(ModelShape)}
    own = {name: value for name, value in asdict(shape).items() if value != usual[name] and name not in {"name", "source"}}
    lines = yaml.safe_dump(own, sort_keys=False).splitlines()
    return "\n".join(
        [
            f"  # The figures of {shape.name}, to change. Under models: of config.yaml, ./benchmark.py --model mine trains it;",
            "  # --parallel, or --tp and --pp, choose how it is split. tprimat/core/models.py (ModelShape) explains each key.",
            "  mine:",
            "    name: My model",
            "    architecture:",
            "      name: mine",
            *(f"      {line}" for line in lines),
        ]
    )


def count_rows(selected: Sequence[ModelShape]) -> list[Row]:
    """Return parameters, and the FLOP of one token by each convention, at 2,048 tokens or the context if shorter."""
    return [
        {
            "model": shape.name,
            **asdict(parameters(shape)),
            "sequence_tokens": (tokens := min(USUAL_SEQUENCE_TOKENS, shape.context_tokens)),
            **{convention: flop_per_token(shape, tokens, convention) for convention in CONVENTIONS},
            "source": shape.source,
        }
        for shape in selected
    ]


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
        f"{screen.prose(title)}\n\n{columns(header, rows, screen=screen, drop=[*flops[1:], *dropped])}"
        for title, header, rows in tables
        if rows
    )


def published_text(rows: Sequence[PublishedResult], screen: Screen = PLAIN) -> str:
    """Return published training runs as text for a terminal."""
    body = []
    for one in rows:
        words = (one.accelerator, one.shape or one.model, one.workload.matmul_dtype, one.engine, one.date)
        speed = _scaled(one.flops_per_second_per_gpu, 1e12)
        body.append([one.name, units.count(one.gpus), speed, *(word or units.ABSENT for word in words)])
    header = ["row", "GPUs", "TFLOP/s/GPU", "accelerator", "model", "dtype", "engine", "date"]
    return columns(header, body, screen=screen, drop=["date", "engine", "accelerator", "dtype"])
