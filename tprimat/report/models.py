"""Tables of the models and accelerators, and of what others published about them: `python3 -m tprimat models`.

Each table has a function for its rows, as numbers in SI units, and one for their text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tprimat.core import published, units
from tprimat.core.accelerators import DTYPES, accelerators, find_accelerator
from tprimat.core.errors import ConfigError
from tprimat.core.flops import CONVENTIONS, flop_per_token, parameters
from tprimat.core.models import ModelShape, model_shape, models
from tprimat.core.published import PublishedResult, rebase
from tprimat.report.screen import PLAIN, Screen
from tprimat.report.tables import columns

USUAL_SEQUENCE_TOKENS = 2048
SUITE_SOURCE = "AMD MI350X Training Benchmark Results"
WITHOUT_BIASES = """linear layers without biases, as the published rates imply.
python3 -m tprimat probe transformer trains these sizes with GPT-2's biases, which are under 0.1 % more parameters."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The models that the tables describe."""

    shapes: tuple[ModelShape, ...]
    all_models: bool
    sequence_tokens: int | None

    def has(self, name: str | None) -> bool:
        """Return whether the tables include a model of this name."""
        return self.all_models or any(shape.name == name for shape in self.shapes)

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


def result_rows(selected: Selection) -> list[Row]:
    """Return published training speeds, as printed and rebased."""
    return [_result_row(result) for result in published.results() if selected.has(result.shape)]


def _result_row(result: PublishedResult) -> Row:
    rebased = rebase(result)
    both = result.mfu is not None and rebased.own_mfu is not None
    return {
        **{name: value for name, value in asdict(result).items() if name != "workload"},
        **asdict(result.workload),
        "shape": result.shape,
        "dtype": result.workload.matmul_dtype,
        "causal_flops_per_second_per_gpu": rebased.flops_per_second_per_gpu,
        "causal_mfu_of_dense_peak": rebased.mfu,
        "own_mfu_of_dense_peak": rebased.own_mfu,
        "mfu_difference": (rebased.own_mfu or 0) - (result.mfu or 0) if both else None,
    }


def accelerator_rows(selected: Selection) -> list[Row]:
    """Return the data sheets, and the memory that a program may use; none when only some models are selected."""
    return [{**asdict(one), "usable_bytes": one.usable_bytes} for one in accelerators()] if selected.all_models else []


def count_table(rows: Sequence[Row], screen: Screen = PLAIN) -> str:
    """Return the rows as text for a terminal."""
    header = ["model", "parameters", "active", "tokens", *(f"{convention} GFLOP/token" for convention in CONVENTIONS)]
    table = columns(
        header, [_count_cells(row) for row in rows], screen=screen, drop=("6n GFLOP/token", "full GFLOP/token", "tokens")
    )
    unbiased = [row["model"] for row in rows if (row["source"] or "").startswith(SUITE_SOURCE)]
    note = f"{', '.join(unbiased)}: {WITHOUT_BIASES}"
    return "\n".join((table, "", *(screen.prose(line) for line in note.split("\n")))) if unbiased else table


def _count_cells(row: Row) -> list[str]:
    gigaflop = [units.significant(row[convention] / 1e9, 4) for convention in CONVENTIONS]
    return [row["model"], units.count(row["total"]), units.count(row["active"]), units.count(row["sequence_tokens"]), *gigaflop]


def result_table(rows: Sequence[Row], screen: Screen = PLAIN) -> str:
    """Return the rows as text for a terminal."""
    header = ["result", "GPUs", "dtype", "tokens", "tokens/s/GPU", "TFLOP/s", "as", "MFU printed", "recomputed", "difference"]
    header += ["causal TFLOP/s", "causal MFU"]
    drop = ("difference", "recomputed", "as", "TFLOP/s", "MFU printed", "tokens", "causal TFLOP/s", "GPUs")
    notes = [f"{row['name']}: {row['notes']}" for row in rows if row["notes"]]
    return "\n".join(
        [columns(header, [_result_cells(row) for row in rows], left=3, screen=screen, drop=drop), "", *map(screen.prose, notes)]
    )


def _result_cells(row: Row) -> list[str]:
    known = find_accelerator(row["accelerator"])
    return [
        row["name"],
        f"{row['gpus']} x {known.name if known else '(not in the table)'}",
        row["dtype"] or units.ABSENT,
        units.count(row["sequence_tokens"]),
        units.count(row["tokens_per_second_per_gpu"]),
        _tera(row["flops_per_second_per_gpu"]),
        row["convention"] or units.ABSENT,
        units.percent(row["mfu"]),
        units.percent(row["own_mfu_of_dense_peak"]),
        units.signed_percent(row["mfu_difference"]),
        _tera(row["causal_flops_per_second_per_gpu"]),
        units.percent(row["causal_mfu_of_dense_peak"]),
    ]


def accelerator_table(rows: Sequence[Row], screen: Screen = PLAIN) -> str:
    """Return the rows as text for a terminal."""
    cells = [
        [
            row["name"],
            *(_tera(row["dense_flops"].get(dtype)) for dtype in DTYPES),
            units.gibibytes(row["usable_bytes"]),
            units.si(row["bandwidth_bytes_per_second"], "B/s"),
            units.si(row["link_bytes_per_second"], "B/s"),
            units.count(row["tdp_watts"]),
        ]
        for row in rows
    ]
    header = ["accelerator", *(f"{dtype} TFLOP/s" for dtype in DTYPES), "memory", "bandwidth", "links", "watts"]
    rare = [f"{dtype} TFLOP/s" for dtype in DTYPES if dtype not in {"bf16", "fp8"}]
    return columns(header, cells, screen=screen, drop=[*rare, "watts"])


def _tera(flops: float | None) -> str:
    return units.ABSENT if flops is None else units.significant(flops / 1e12, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table: its rows as numbers, and their text."""

    title: str
    rows: Callable[[Selection], list[Row]]
    text: Callable[[Sequence[Row], Screen], str]


TABLES = {
    "counts": Table(title="Parameters, and FLOP of one token (forward and backward)", rows=count_rows, text=count_table),
    "results": Table(
        title="Published training speeds; recomputed: the printed rate over the dense peak; difference in points",
        rows=result_rows,
        text=result_table,
    ),
    "accelerators": Table(
        title="Dense peaks and memory of one GPU as torch sees it", rows=accelerator_rows, text=accelerator_table
    ),
}

BRIEF = ("counts", "accelerators")
"""The tables that name what can be planned."""


def text_of(rows: Mapping[str, Sequence[Row]], screen: Screen = PLAIN) -> str:
    """Return tables, key of TABLES -> rows, as text for a terminal; tables without rows are left out."""
    titles = {name: screen.prose(TABLES[name].title, meaning="heading") for name in rows}
    return "\n\n".join(f"{titles[name]}\n\n{TABLES[name].text(found, screen)}" for name, found in rows.items() if found)
