"""The rows of `python -m tprimat.cli.models --table hardware`: what a page prints of accelerators, beside their data sheets."""

from collections.abc import Sequence
from typing import Any

from tprimat import units
from tprimat.facts.accelerators import find_accelerator
from tprimat.facts.published_sizes import HARDWARE
from tprimat.report.tables import columns

Row = dict[str, Any]


def hardware_rows(*, wanted: bool) -> list[Row]:
    """One row a figure; none where only some models are asked for."""
    rows: list[Row] = []
    for printed in HARDWARE if wanted else ():
        sheet = find_accelerator(printed.accelerator)
        if sheet is None:
            continue
        figures = {
            f"{dtype} peak": (sheet.dense_flops.get(dtype), flops, "FLOP/s") for dtype, flops in printed.peak_flops.items()
        }
        figures["memory bandwidth"] = (sheet.bandwidth_bytes_per_second, printed.bandwidth_bytes_per_second, "B/s")
        figures["links"] = (sheet.link_bytes_per_second, printed.link_bytes_per_second, "B/s")
        rows += [
            {
                "accelerator": sheet.name,
                "figure": name,
                "ours": ours,
                "printed": theirs,
                "unit": unit,
                "difference": ours / theirs - 1 if ours else None,
                "source": printed.source,
            }
            for name, (ours, theirs, unit) in figures.items()
        ]
    return rows


def hardware_table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    cells = [
        [
            row["accelerator"],
            row["figure"],
            units.si(row["ours"], row["unit"]),
            units.si(row["printed"], row["unit"]),
            units.signed_percent(row["difference"]),
            row["source"],
        ]
        for row in rows
    ]
    return columns(["accelerator", "figure", "data sheet", "printed", "difference", "printed by"], cells, left=2)
