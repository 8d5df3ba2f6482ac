"""What the energy of a token says about the lead over Transformer Engine's layers: a table of results/performance.md."""

import json
from pathlib import Path
from statistics import mean, median

from speed_layouts import LAYOUTS, Layout

from tprimat.core.flops import attention_matrices, feed_forward_matrices, output_matrix
from tprimat.core.models import model_shape
from tprimat.engines import megatron
from tprimat.predict.rates import under_load
from tprimat.records.discover import probes_in
from tprimat.records.schema import ProbeRecord
from tprimat.report.tables import table

PROGRAMS = {megatron.ENGINE.name: "embedded engine", "transformer_engine": "with Transformer Engine's layers"}
MODEL = "llama-3.1-8b"
SERIES = {"bf16": ("with-transformer-engine", 1.05), "fp8": ("fp8-current-scaling", 1.15)}
"""Precision -> the folder of both programs, and how many times as fast as the other the embedded engine aims to be."""
PASSES = ("fprop", "dgrad", "wgrad")


def energy(results: Path) -> str:
    """List the energy per token and of its matrix products, by layout and program, and what a lead would leave for the rest."""
    probes, _ = probes_in([results / "probes-1gpu"])
    rows: list[list[str]] = []
    goals: list[str] = []
    for layout in (layout for layout in LAYOUTS if layout.pipeline == layout.tensor == 1):
        (folder, lead), ours = SERIES[layout.precision], 0.0
        products = joules_of_products(layout, probes)
        for place, (program, words) in enumerate(PROGRAMS.items()):
            files = sorted((results / folder / program / layout.name).glob("*/benchmark_*.json"))
            metrics = [json.loads(file.read_text(encoding="utf8"))["metrics"] for file in files]
            if len(metrics) < 2 or products is None:
                continue
            rate = mean(one["tokens_per_second_per_gpu"]["value"] for one in metrics)
            joules = mean(one["joules_per_token"] for one in metrics)
            cells = (f"{rate:,.0f}", f"{joules * rate:.0f} W", f"{joules * 1e3:.1f} mJ", f"{products * 1e3:.1f} mJ")
            if place == 0:
                ours = rate
            elif ours < lead * rate:
                left = (joules / lead - products) * 1e3
                speed = f"At {lead} times the speed of Transformer Engine's layers and the same power"
                goals.append(f"{speed}, `{layout.name}` would have {left:.1f} mJ for the rest.")
            rows.append([f"`{layout.name}`", words, str(len(metrics)), *cells, f"{(joules - products) * 1e3:.1f} mJ"])
    header = (
        "layout",
        "program",
        "runs",
        "tokens/s/GPU",
        "mean power per GPU",
        "energy per token",
        "matrix products",
        "the rest",
    )
    return table(header, rows, left=2) + "\n\n" + " ".join(goals)


def joules_of_products(layout: Layout, probes: list[ProbeRecord]) -> float | None:
    """Return the joules of a token's matrix products, by the probes under load at the rows of a micro-batch.

    The output layer, in bf16 always, takes a joule for as many FLOP as the layers' products in bf16 do in the same pass.
    """
    shape, tokens = model_shape(MODEL), layout.micro_batch * layout.sequence
    of_layers, of_output = (joules_per_flop(probes, tokens, dtype) for dtype in (layout.precision, "bf16"))
    if set(of_layers) != set(PASSES) or set(of_output) != set(PASSES):
        return None
    matrices = [*attention_matrices(shape), *feed_forward_matrices(shape)] * shape.layers
    in_layers = sum(matrix.parameters for matrix in matrices)
    return 2.0 * (in_layers * sum(of_layers.values()) + output_matrix(shape).parameters * sum(of_output.values()))


def joules_per_flop(probes: list[ProbeRecord], tokens: int, dtype: str) -> dict[str, float]:
    """Return the joules per FLOP of each pass, weighted by the FLOP of the layer's products."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    shape = model_shape(MODEL)
    layer = {frozenset((matrix.inputs, matrix.outputs)) for matrix in [*attention_matrices(shape), *feed_forward_matrices(shape)]}
    for probe in probes:
        if probe.kind not in PASSES or probe.dtype != dtype or not under_load(probe) or not probe.power_watts or not probe.flop:
            continue
        kind, sides = _pass(probe, tokens)
        if sides in layer:
            by_kind.setdefault(kind, []).append((probe.flop, probe.power_watts * median(probe.seconds)))
    return {kind: sum(joules for _, joules in pairs) / sum(flop for flop, _ in pairs) for kind, pairs in by_kind.items()}


def _pass(probe: ProbeRecord, tokens: int) -> tuple[str, frozenset[int]]:
    """Return the pass for which a product of some tokens was probed, and the sides of its weight; no sides for other tokens.

    In fp8 a weight's gradient is probed like dgrad: both move partial sums to fp32.
    """
    m, n, k = (probe.shape[side] for side in "mnk")
    if probe.kind != "wgrad" and m == tokens:
        return probe.kind, frozenset((k, n))
    if probe.kind != "fprop" and k == tokens and (probe.kind == "wgrad" or probe.dtype == "fp8"):
        return "wgrad", frozenset((m, n))
    return probe.kind, frozenset()
