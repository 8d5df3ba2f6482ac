"""What the models and accelerators are, and what published training speeds mean by one yardstick.

python -m tprimat.cli.models
python -m tprimat.cli.models llama-3.1-8b qwen-2.5-7b --sequence 8192
python -m tprimat.cli.models --table results
python -m tprimat.cli.models mixtral-8x7b --json
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tprimat import units
from tprimat.cli.console import outlasting
from tprimat.cli.hardware_rows import hardware_rows, hardware_table
from tprimat.errors import ConfigError, UserError
from tprimat.facts.accelerators import ACCELERATORS, find_accelerator
from tprimat.facts.flops import CONVENTIONS, flop_per_token
from tprimat.facts.gpt_models import MI350X_SUITE
from tprimat.facts.models import MODELS, ModelShape, model_shape
from tprimat.facts.parameters import BYTES_PER_WEIGHT, parameters, weight_bytes
from tprimat.facts.published import PublishedResult, rebase
from tprimat.facts.published_results import RESULTS
from tprimat.facts.published_sizes import SIZES, WEIGHTS
from tprimat.report.tables import columns

USUAL_SEQUENCE_TOKENS = 2048
WITHOUT_BIASES = """linear layers without biases, as the published rates imply.
python -m tprimat.cli.suite trains these sizes with GPT-2's biases, which are under 0.1 % more parameters."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the tables are about."""

    shapes: tuple[ModelShape, ...]
    all_models: bool
    sequence_tokens: int | None

    def has(self, name: str | None) -> bool:
        """Whether a row about a model of this name is wanted."""
        return self.all_models or any(shape.name == name for shape in self.shapes)

    def sequence(self, shape: ModelShape) -> int:
        """Sequence to count FLOP at: as asked, else 2,048 tokens or the model's whole context where that is shorter."""
        return self.sequence_tokens or min(USUAL_SEQUENCE_TOKENS, shape.context_tokens)


def count_rows(chosen: Selection) -> list[Row]:
    """Parameters, and FLOP of one token by each convention."""
    return [
        {
            "model": shape.name,
            **asdict(parameters(shape)),
            "sequence_tokens": chosen.sequence(shape),
            **{convention: flop_per_token(shape, chosen.sequence(shape), convention) for convention in CONVENTIONS},
            "source": shape.source,
        }
        for shape in chosen.shapes
    ]


def size_rows(chosen: Selection) -> list[Row]:
    """Printed parameter counts beside ours."""
    rows: list[Row] = []
    for size in SIZES:
        if chosen.has(size.shape):
            count = parameters(MODELS[size.shape])
            active = count.active - (0 if size.active_has_input_table else count.embedding)
            rows.append(
                {
                    "model": size.shape,
                    "source": size.source,
                    "total": count.total,
                    "total_printed": size.total,
                    "total_difference": count.total / size.total - 1,
                    "active": active,
                    "active_has_input_table": size.active_has_input_table,
                    "active_printed": size.active,
                    "active_difference": active / size.active - 1 if size.active else None,
                }
            )
    return rows


def memory_rows(chosen: Selection) -> list[Row]:
    """Bytes of the weights by dtype, and what a source prints for them."""
    printed = {weights.shape: weights.bytes_by_dtype for weights in WEIGHTS}
    rows: list[Row] = []
    for shape in chosen.shapes:
        row: Row = {"model": shape.name}
        for dtype in BYTES_PER_WEIGHT:
            ours, theirs = weight_bytes(shape, dtype), printed.get(shape.name, {}).get(dtype)
            row |= {dtype: ours, f"{dtype}_printed": theirs, f"{dtype}_difference": ours / theirs - 1 if theirs else None}
        rows.append(row)
    return rows


def result_rows(chosen: Selection) -> list[Row]:
    """Published training speeds, as printed and rebased."""
    return [_result_row(result) for result in RESULTS if chosen.has(result.shape)]


def _result_row(result: PublishedResult) -> Row:
    rebased = rebase(result)
    both = result.mfu is not None and rebased.own_mfu is not None
    return {
        **asdict(result),
        "causal_flops_per_second_per_gpu": rebased.flops_per_second_per_gpu,
        "causal_mfu_of_dense_peak": rebased.mfu,
        "own_mfu_of_dense_peak": rebased.own_mfu,
        "mfu_difference": (rebased.own_mfu or 0) - (result.mfu or 0) if both else None,
    }


def accelerator_rows(chosen: Selection) -> list[Row]:
    """The data sheets."""
    return [asdict(accelerator) for accelerator in ACCELERATORS] if chosen.all_models else []


def count_table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    header = ["model", "parameters", "active", "tokens", *(f"{convention} GFLOP/token" for convention in CONVENTIONS)]
    table = columns(header, [_count_cells(row) for row in rows])
    unbiased = [row["model"] for row in rows if row["source"] == MI350X_SUITE]
    return "\n".join((table, "", f"{', '.join(unbiased)}: {WITHOUT_BIASES}")) if unbiased else table


def _count_cells(row: Row) -> list[str]:
    gigaflop = [units.significant(row[convention] / 1e9, 4) for convention in CONVENTIONS]
    return [row["model"], units.count(row["total"]), units.count(row["active"]), units.count(row["sequence_tokens"]), *gigaflop]


def size_table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    header = ["model", "printed by", "total", "printed", "difference", "active", "printed", "difference"]
    notes = ["A printed figure is rounded or cut: 37 G may stand for anything from 36.5 to below 38 G."]
    if without := ", ".join(dict.fromkeys(row["model"] for row in rows if not row["active_has_input_table"])):
        notes.append(f"Active without the input table, with which the printed figure would not fit: {without}.")
    return "\n".join((columns(header, [_size_cells(row) for row in rows], left=2), "", *notes))


def _size_cells(row: Row) -> list[str]:
    cells = [row["model"], row["source"]]
    for key in ("total", "active"):
        shown = [units.si(row[key]), units.si(row[f"{key}_printed"]), units.signed_percent(row[f"{key}_difference"])]
        cells += shown if row[f"{key}_printed"] else [units.ABSENT] * 3
    return cells


def memory_table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    header = ["model"]
    for dtype in BYTES_PER_WEIGHT:
        header += [dtype, "printed", "difference"]
    return columns(header, [_memory_cells(row) for row in rows])


def _memory_cells(row: Row) -> list[str]:
    cells = [row["model"]]
    for dtype in BYTES_PER_WEIGHT:
        printed = row[f"{dtype}_printed"]
        cells += [units.si(row[dtype], "B"), units.si(printed, "B") if printed else units.ABSENT]
        cells.append(units.signed_percent(row[f"{dtype}_difference"]))
    return cells


def result_table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    header = ["result", "GPUs", "dtype", "tokens", "tokens/s/GPU", "TFLOP/s", "as", "MFU printed", "recomputed", "difference"]
    header += ["causal TFLOP/s", "causal MFU"]
    notes = [f"{row['name']}: {row['notes']}" for row in rows if row["notes"]]
    return "\n".join([columns(header, [_result_cells(row) for row in rows], left=3), "", *notes])


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


def accelerator_table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    dtypes = ("fp32", "tf32", "fp16", "bf16", "fp8")
    cells = [
        [
            row["name"],
            *(_tera(row["dense_flops"].get(dtype)) for dtype in dtypes),
            units.gibibytes(row["memory_bytes"]),
            units.si(row["bandwidth_bytes_per_second"], "B/s"),
            units.si(row["link_bytes_per_second"], "B/s"),
            units.count(row["tdp_watts"]),
        ]
        for row in rows
    ]
    return columns(["accelerator", *(f"{dtype} TFLOP/s" for dtype in dtypes), "memory", "bandwidth", "links", "watts"], cells)


def _tera(flops: float | None) -> str:
    return units.ABSENT if flops is None else units.significant(flops / 1e12, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table: its rows as numbers, and how they print."""

    title: str
    rows: Callable[[Selection], list[Row]]
    text: Callable[[Sequence[Row]], str]


TABLES = {
    "counts": Table(title="Parameters, and FLOP of one token (forward and backward)", rows=count_rows, text=count_table),
    "sizes": Table(title="Parameter counts that others print", rows=size_rows, text=size_table),
    "memory": Table(title="Memory of the weights alone", rows=memory_rows, text=memory_table),
    "results": Table(
        title="Published training speeds; recomputed: the printed rate over the dense peak; difference in points",
        rows=result_rows,
        text=result_table,
    ),
    "hardware": Table(
        title="Accelerators as others print them; a data sheet's dense peak is half of one with 2:4 sparsity",
        rows=lambda chosen: hardware_rows(wanted=chosen.all_models),
        text=hardware_table,
    ),
    "accelerators": Table(title="Dense peaks of one GPU as torch sees it", rows=accelerator_rows, text=accelerator_table),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tprimat.cli.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(MODELS)} (all)")
    made.add_argument(
        "--sequence",
        type=int,
        metavar="N",
        help="tokens to count FLOP at; models with a shorter context are left out (2048, or the context if shorter)",
    )
    made.add_argument("--table", choices=TABLES, action="append", help="only this table; may be repeated")
    made.add_argument("--json", action="store_true", help="print the rows as JSON, in SI units and with sources")
    return made


def selection(options: argparse.Namespace) -> Selection:
    """What the command line asks for.

    Raises:
        ConfigError: no such model, or a sequence that no model of the selection can read.
    """
    shapes = tuple(model_shape(name) for name in options.models) or tuple(MODELS.values())
    if options.sequence is not None:
        longest = max(shape.context_tokens for shape in shapes)
        if not 1 <= options.sequence <= longest:
            raise ConfigError(
                f"A sequence of {options.sequence} tokens is out of range.", where="--sequence", fix=f"1 to {longest:,} tokens"
            )
        shapes = tuple(shape for shape in shapes if options.sequence <= shape.context_tokens)
    return Selection(shapes=shapes, all_models=not options.models, sequence_tokens=options.sequence)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake in the command line."""
    options = parser().parse_args(argv)
    try:
        chosen = selection(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = {name: TABLES[name].rows(chosen) for name in options.table or TABLES}
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n\n".join(f"{TABLES[name].title}\n\n{TABLES[name].text(found)}" for name, found in rows.items() if found))
    return 0


if __name__ == "__main__":
    sys.exit(outlasting(main))
