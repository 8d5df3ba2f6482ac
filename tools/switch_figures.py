"""Tables of the gain of each switch of the embedded engine, and of the cost of each way to exchange between tensor ranks."""

import json
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path

from record_figures import NOTHING, groups_in, rate, repeated, steps, times

from tprimat.analyze.compare import Question, verdict
from tprimat.analyze.groups import Group, group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.config.schema import EngineOptions
from tprimat.core import units
from tprimat.records.schema import RunRecord
from tprimat.report.tables import table


def options_of(run: RunRecord) -> dict[str, object]:
    """Return every switch of a run; the dtypes of its matrix products and of its gradients count as two."""
    gradients = run.engine_options.get("gradients", "fp32")
    others = {name: value for name, value in run.engine_options.items() if name != "gradients"}
    return {**others, "gradients: bf16": gradients == "bf16", "fp8": run.ran.matmul_dtype == "fp8"}


def workload(run: RunRecord) -> tuple[object, ...]:
    """Return what two runs must share for a switch to be their only difference, versions included."""
    layers = run.ran.shape.layers if run.ran.shape else None
    versions = tuple(sorted((name, version) for name, version in run.software.items() if name in {"torch", "megatron-core"}))
    ran = run.ran
    split = (ran.tensor_parallel, ran.pipeline_parallel, ran.data_parallel)
    return (run.model, layers, split, ran.micro_batch_sequences, ran.global_batch_sequences, ran.sequence_tokens, versions)


USUAL_SEQUENCE = 2048
"""Tokens of a sequence that a workload does not name."""
EVIDENCE_FIELD = {"cudnn_attention": "attention"}
"""Switch -> the field of the evidence that must differ, where torch might make the same choice without the switch."""


def switch_pairs(results: Path) -> Iterator[tuple[str, Group, Group]]:
    """Yield the name of a switch, the runs with it off and those with it on, where all else is equal; from runs of one folder.

    Both are measured over the same steps, from the start of the later of their steady windows.
    """
    for series in sorted(results.glob("switches/*/")):
        for off, on in product(groups_in(series, []), repeat=2):
            without, having = options_of(off.run), options_of(on.run)
            differing = [name for name in having.keys() | without.keys() if having.get(name) != without.get(name)]
            if workload(off.run) != workload(on.run) or len(differing) != 1 or having.get(differing[0]) is not True:
                continue
            if took_effect(differing[0], off, on):
                yield differing[0], *over_the_same_steps(off, on)


def took_effect(name: str, off: Group, on: Group) -> bool:
    """Whether the evidence shows the effect of a switch that has an EVIDENCE_FIELD; True for all others."""
    part = EVIDENCE_FIELD.get(name)
    seen = [getattr(group.run.ran, part) for group in (off, on)] if part else []
    return part is None or (None not in seen and seen[0] != seen[1])


def over_the_same_steps(off: Group, on: Group) -> tuple[Group, Group]:
    """Return both groups without the first steps that the window of any of their runs leaves out."""
    first = max(item.metrics.window.first_step for group in (off, on) for item in group.runs if item.metrics)
    options = MetricOptions(warmup=first - 1)
    return tuple(group_runs([measure(item.result, options) for item in group.runs])[0] for group in (off, on))


def described(run: RunRecord) -> str:
    """Return the workload of a run in a few words."""
    layers = run.ran.shape.layers if run.ran.shape else units.ABSENT
    split = f"TP{run.ran.tensor_parallel} PP{run.ran.pipeline_parallel} DP{run.ran.data_parallel}"
    sequence = "" if run.ran.sequence_tokens == USUAL_SEQUENCE else f" s{run.ran.sequence_tokens}"
    fp8 = ", fp8" if run.ran.matmul_dtype == "fp8" else ""
    return f"{layers} layers, {split}, MBS{run.ran.micro_batch_sequences}{sequence}{fp8}"


def loss_differences(off: Group, on: Group) -> str:
    """Return the relative difference of losses with and without a switch: in the first step, and the largest of any step."""
    pairs = zip(off.runs[0].result.steps, on.runs[0].result.steps, strict=False)
    differences = [abs(one.loss - other.loss) / abs(one.loss) for one, other in pairs if one.loss and other.loss]
    return f"{differences[0]:.0e} / {max(differences):.0e}" if differences else units.ABSENT


def switches(results: Path) -> str:
    """Return the table of switches, measured on and off."""
    rows = []
    for name, off, on in sorted(switch_pairs(results), key=lambda pair: (pair[0], str(workload(pair[1].run)))):
        gain = verdict(off, on, Question(even_if_different=True)).ratio
        memory = [max(item.metrics.peak_memory_bytes or 0 for item in group.runs if item.metrics) for group in (off, on)]
        rows.append(
            [
                f"`{name}`",
                described(off.run),
                repeated(rate(off), units.count, off),
                repeated(rate(on), units.count, on),
                f"{steps(off)} / {steps(on)}",
                repeated(gain, times, off, on),
                " / ".join(units.gibibytes(size or None) for size in memory),
                loss_differences(off, on),
            ]
        )
    header = ("switch", "workload", "off, tokens/s/GPU", "on, tokens/s/GPU", "n off / on", "on / off, our clock")
    header += ("memory off / on", "loss, step 1 / largest")
    return table(header, rows, left=2) + unmeasured(results) if rows else NOTHING


ELSEWHERE = {"cuda_graphs", "fp8_scaling"}
"""Switches with tables of their own; `fp8_scaling` is for Transformer Engine."""


def unmeasured(results: Path) -> str:
    """Return a sentence that names the switches without runs to compare; empty where there are none."""
    measured = {name.partition(":")[0] for name, _, _ in switch_pairs(results)}
    names = [f"`{field.name}`" for field in fields(EngineOptions) if field.name not in measured | ELSEWHERE]
    return f"\n\nWithout a recorded pair of runs: {', '.join(names)}." if names else ""


def no_gain(results: Path) -> str:
    """Return a list of the switches whose interval does not lie above 1."""
    lines = []
    for name, off, on in sorted(switch_pairs(results), key=lambda pair: pair[0]):
        gain = verdict(off, on, Question(even_if_different=True)).ratio
        if gain and gain.low is not None and gain.low <= 1:
            runs = "one run per side" if len(off.runs) == len(on.runs) == 1 else f"{len(off.runs)} and {len(on.runs)} runs"
            lines.append(f"- `{name}`, {described(on.run)}: {repeated(gain, times, off, on)} times the rate without it ({runs}).")
    return "\n".join(lines) or "Every switch that was measured shows a gain."


def exchanges(results: Path) -> str:
    """Return the table of products that tensor ranks exchange, each way, for each number of ranks."""
    rows = []
    for file in sorted((results / "exchange").glob("*.json")):
        document = json.loads(file.read_text(encoding="utf8"))
        rows += [
            (
                f"{document['ranks']} x {document['accelerator']}",
                product_record["product"],
                product_record["way"],
                f"{product_record['median']:.3f} ms",
                f"{min(product_record['milliseconds'][1:]):.3f} to {max(product_record['milliseconds'][1:]):.3f} ms",
                f"{product_record['largest_difference']:.0e}",
            )
            for product_record in document["products"]
        ]
    header = ("ranks", "product", "way", "median", "rounds after the first", "largest difference from NCCL's")
    return table(header, rows, left=3) if rows else NOTHING


def exchanges_as_graphs(results: Path) -> str:
    """Return the table of products that four H100 exchange, each way's calls as one CUDA graph."""
    file = results.parent / "h100" / "exchange" / "4-ranks-graphs.json"
    document = json.loads(file.read_text(encoding="utf8")) if file.exists() else {"products": []}
    medians: dict[str, dict[str, float]] = {}
    for one in document["products"]:
        medians.setdefault(one["product"], {})[one["way"]] = one["median"]
    ways = {"NCCL": "nccl", "ours": "ours", "ours, two streams": "lanes 2", "ours, behind": "ours, behind"}
    rows = [
        [product, *(f"{times[way] * 1e3:.0f} µs" if way in times else units.ABSENT for way in ways.values())]
        for product, times in medians.items()
    ]
    return table(("product", *ways), rows, left=1) if rows else NOTHING


def copy_streams(results: Path) -> str:
    """Return the table of trainings under TP4 as CUDA graphs, with copies between ranks in one stream or two."""
    folder = results.parent / "h100" / "copy-streams"
    rows = [
        [name.replace("-", " "), str(len(group.runs)), repeated(rate(group), units.count, group), steps(group)]
        for name in ("one-stream", "two-streams")
        for group in groups_in(folder / name, [])
    ]
    return table(("copies in", "runs", "tokens/s/GPU", "n"), rows, left=1) if rows else NOTHING


def forward_sums(results: Path) -> str:
    """Return the table of trainings whose forward sums over tensor ranks run in pieces, as now, and through NCCL."""
    folders = {"in pieces": results / "switches" / "tensor" / "on-1"}
    folders |= {"through NCCL": results / "exchange" / "forward-sums-through-nccl"}
    groups = [(name, group) for name, folder in folders.items() for group in groups_in(folder, [])]
    rows = [[name, described(group.run), repeated(rate(group), units.count, group), steps(group)] for name, group in groups]
    return table(("sums", "workload", "tokens/s/GPU", "n"), rows, left=2) if rows else NOTHING


UNSWITCHED = {
    "layer-end-sums": "the sum at a layer's end in the next norm's kernel, instead of its own",
    "norm-not-awaited": "the host goes on without the gradients' norm, instead of waiting for it",
    "norm-backward-in-one-pass": "the norm's backward in one kernel of our own, instead of the compiler's two",
    "attention-in-fp8": "attention in fp8, instead of bf16, under Transformer Engine's layers with delayed scaling",
}
"""Folder of benchmarks/records/h200/unswitched -> the change."""


def unswitched(results: Path) -> str:
    """Return the table of changes without a switch, from two copies of the sources, with and without, that ran in turn."""
    rows = []
    for name, change in UNSWITCHED.items():
        sides = [groups_in(results / "unswitched" / name / side, []) for side in ("without", "with")]
        for without, having in zip(*sides, strict=True):
            off, on = over_the_same_steps(without, having)
            rows.append(
                [
                    change,
                    described(on.run),
                    repeated(rate(off), units.count, off),
                    repeated(rate(on), units.count, on),
                    f"{steps(off)} / {steps(on)}",
                    repeated(verdict(off, on, Question(even_if_different=True)).ratio, times, off, on),
                ]
            )
    header = (
        "change",
        "workload",
        "without, tokens/s/GPU",
        "with, tokens/s/GPU",
        "n without / with",
        "with / without, our clock",
    )
    return table(header, rows, left=2) if rows else NOTHING
