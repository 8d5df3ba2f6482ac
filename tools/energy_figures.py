"""What the energy of a token says about the lead over Transformer Engine's layers: docs/performance.md's table of it."""

import json
from pathlib import Path
from statistics import mean, median

from speed_layouts import LAYOUTS, Layout

from tprimat.engines import embedded
from tprimat.facts.flops import attention_matrices, feed_forward_matrices, output_matrix
from tprimat.facts.models import model_shape
from tprimat.predict.rates import under_load
from tprimat.records.discover import probes_in
from tprimat.records.schema import ProbeRecord
from tprimat.report.tables import table

PROGRAMS = {embedded.ENGINE.name: "embedded engine", "transformer_engine": "with Transformer Engine's layers"}
MODEL = "llama-3.1-8b"
LEAD = 1.05
"""Times as fast as with Transformer Engine's layers: what the embedded engine aims at."""
PASSES = ("fprop", "dgrad", "wgrad")


def energy(results: Path) -> str:
    """List what a token and its matrix products take, by layout and program, and what a lead of LEAD would leave for the rest."""
    probes, _ = probes_in([results / "probes-1gpu"])
    rows: list[list[str]] = []
    goals: list[str] = []
    for layout in (layout for layout in LAYOUTS if layout.precision == "bf16" and layout.pipeline == layout.tensor == 1):
        products, ours = joules_of_products(layout, probes), 0.0
        for place, (program, words) in enumerate(PROGRAMS.items()):
            files = sorted((results / "with-transformer-engine" / program / layout.name).glob("*/benchmark_*.json"))
            found = [json.loads(file.read_text(encoding="utf8"))["metrics"] for file in files]
            if len(found) < 2 or products is None:
                continue
            rate = mean(one["tokens_per_second_per_gpu"]["value"] for one in found)
            joules = mean(one["joules_per_token"] for one in found)
            cells = (f"{rate:,.0f}", f"{joules * rate:.0f} W", f"{joules * 1e3:.1f} mJ", f"{products * 1e3:.1f} mJ")
            if place == 0:
                ours = rate
            elif ours < LEAD * rate:
                left = (joules / LEAD - products) * 1e3
                goals.append(f"`{layout.name}` {LEAD} times as fast at that power would leave {left:.1f} mJ for the rest.")
            rows.append([f"`{layout.name}`", words, str(len(found)), *cells, f"{(joules - products) * 1e3:.1f} mJ"])
    header = ("layout", "program", "runs", "tokens/s/GPU", "mean power per GPU", "a token", "its matrix products", "the rest")
    return table(header, rows, left=2) + "\n\n" + " ".join(goals)


def joules_of_products(layout: Layout, probes: list[ProbeRecord]) -> float | None:
    """Return what the matrix products of a token take, by the probes under load at the rows of a micro-batch.

    The output layer takes a joule for as many FLOP as the layers' products do in the same pass.
    """
    shape, tokens = model_shape(MODEL), layout.micro_batch * layout.sequence
    each = joules_per_flop(probes, tokens)
    if set(each) != set(PASSES):
        return None
    layers = [*attention_matrices(shape), *feed_forward_matrices(shape)] * shape.layers
    weights = sum(matrix.inputs * matrix.outputs * matrix.copies for matrix in [*layers, output_matrix(shape)])
    return 2.0 * weights * sum(each.values())


def joules_per_flop(probes: list[ProbeRecord], tokens: int) -> dict[str, float]:
    """Return for each pass the joules of a FLOP, weighted by the FLOP of the layer's products."""
    found: dict[str, list[tuple[float, float]]] = {}
    shape = model_shape(MODEL)
    layer = {frozenset((matrix.inputs, matrix.outputs)) for matrix in [*attention_matrices(shape), *feed_forward_matrices(shape)]}
    for probe in probes:
        sides = probe.shape
        if probe.kind not in PASSES or probe.dtype != "bf16" or not under_load(probe) or not probe.power_watts or not probe.flop:
            continue
        inner = {"wgrad": ("m", "n")}.get(probe.kind, ("k", "n"))
        if sides["k" if probe.kind == "wgrad" else "m"] == tokens and frozenset(sides[side] for side in inner) in layer:
            found.setdefault(probe.kind, []).append((probe.flop, probe.power_watts * median(probe.seconds)))
    return {kind: sum(joules for _, joules in pairs) / sum(flop for flop, _ in pairs) for kind, pairs in found.items()}
