#!/usr/bin/env python3
"""Measure an engine (the embedded one, or --engine nemo) under one layout after another, alternating with its peers.

python3 benchmarks/engine_speed.py --output output/engine-speed
python3 benchmarks/engine_speed.py --only dp_mbs4,tp2_mbs4 --steps 14 --rounds 2
python3 benchmarks/engine_speed.py --gpus 2 --equal-work    give each of two GPUs the work of one of four
python3 benchmarks/engine_speed.py --resume    continue an interrupted series
python3 benchmarks/engine_speed.py --engine nemo --only dp_mbs2,tp4_mbs4,tp2_pp2_mbs4,qwen_dp_mbs2,qwen_tp2_pp2_mbs4 --steps 12
python3 benchmarks/engine_speed.py --platform cpu --gpus 2 --only dp_mbs4 --steps 3    only check that it works

The peers are the embedded engine with Transformer Engine's layers, which is Megatron-LM as NVIDIA runs it
(`--transformer-engine`), and torchtitan, where it is installed. Each runs every layout that it can express right after the
engine, in every round, so that a drift of the machine affects all. Layouts that do not fit the GPUs here are left out and
listed. Each run leaves its records under --output; the table is printed and written to engine_speed.json from those records.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shallow import write_shallow_config  # noqa: E402
from speed_layouts import LAYOUTS, MEANT_FOR, Layout  # noqa: E402

from tprimat import units  # noqa: E402
from tprimat.analyze.compare import Question, verdict  # noqa: E402
from tprimat.analyze.groups import Group, Measured, group_estimate, group_runs, measure  # noqa: E402
from tprimat.analyze.metrics import MetricOptions  # noqa: E402
from tprimat.engines import embedded, torchtitan  # noqa: E402
from tprimat.errors import UserError  # noqa: E402
from tprimat.facts.accelerators import PLATFORM_OF  # noqa: E402
from tprimat.hardware.nodes import this_machine  # noqa: E402
from tprimat.plan.evidence import mismatches  # noqa: E402
from tprimat.plan.schema import RunPlan  # noqa: E402
from tprimat.records.benchmark_file import RunResult  # noqa: E402
from tprimat.records.discover import load_results  # noqa: E402
from tprimat.records.schema import Estimate  # noqa: E402
from tprimat.records.store import as_document, write_atomically  # noqa: E402
from tprimat.report.tables import columns, with_interval  # noqa: E402
from tprimat.runner.run import run_plan  # noqa: E402
from tprimat.runner.session import RunRequest, prepare  # noqa: E402

HEADER = ("layout", "program", "split", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "memory", "first step", "n", "target", "faster by")
EMBEDDED, PEER = embedded.ENGINE.name, torchtitan.ENGINE.name
TRANSFORMER_ENGINE = "transformer_engine"
"""The program that is the embedded engine with Transformer Engine's layers."""


@dataclass(kw_only=True)
class Row:
    """The runs of one program under one layout."""

    layout: Layout
    program: str
    runs: list[Measured] = field(default_factory=list)
    why_none: str | None = None
    faster: Estimate | None = None
    """Throughput over torchtitan's."""

    @property
    def group(self) -> Group | None:
        """The runs that count, if they are alike."""
        groups = group_runs(self.runs)
        return groups[0] if len(groups) == 1 else None


def on_cpu(layout: Layout, ranks: int) -> Layout:
    """Return the same split with little work, in fp32."""
    replicas = ranks // (layout.tensor * layout.pipeline * layout.context)
    little = {"micro_batch": 1, "global_batch": 4 * replicas, "sequence": 64, "layers": layout.layers and 2}
    return replace(layout, **little, precision="fp32", optimizer_states="fp32")


def request_of(layout: Layout, options: argparse.Namespace, ranks: int, output: Path) -> RunRequest:
    """Return the request of one run, with the layout as a strategy of its own."""
    strategy = f"parallelism.{layout.name}.{layout.model}.{options.platform}"
    settings = [
        f"{strategy}.tensor_model_parallel_size={layout.tensor}",
        f"{strategy}.pipeline_model_parallel_size={layout.pipeline}",
        f"{strategy}.expert_model_parallel_size={layout.expert}",
        f"{strategy}.context_parallel_size={layout.context}",
        f"training.routing={layout.routing}",
    ]
    if layout.virtual:
        settings.append(f"{strategy}.virtual_pipeline_model_parallel_size={layout.virtual}")
    if layout.recompute != "none":
        settings.append(f"platform_optimizations.{options.platform}.recompute={layout.recompute}")
    if layout.optimizer_states != "fp32":
        settings.append(f"platform_optimizations.{options.platform}.engine_options.optimizer_states={layout.optimizer_states}")
    return RunRequest(
        platform=options.platform,
        model=layout.model,
        strategy=layout.name,
        engine=options.engine,
        gpus=ranks,
        steps=options.steps,
        micro_batch_size=layout.micro_batch,
        global_batch_size=layout.global_batch,
        sequence_length=layout.sequence,
        precision=layout.precision,
        config=config_of(layout, options.output),
        output=output,
        probes=tuple(options.probes),
        settings=(*settings, *options.settings),
        command=("benchmarks/engine_speed.py", *sys.argv[1:]),
    )


def config_of(layout: Layout, folder: Path) -> Path | None:
    """Write the configuration of a layout whose model is not config.yaml's; None where it is."""
    if layout.layers is None and layout.architecture is None:
        return None
    file = folder / f"{layout.name}.yaml"
    write_shallow_config(file, layout.layers, layout.model, layout.architecture)
    return file.resolve()


def run_engine(request: RunRequest, *, resume: bool) -> None:
    """Run the engine once through ./benchmark.py; the result is in its records."""
    names = (
        "platform",
        "model",
        "engine",
        "gpus",
        "steps",
        "micro_batch_size",
        "global_batch_size",
        "sequence_length",
        "precision",
    )
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(request, name)))]
    words += ["--config", str(request.config)] if request.config else []
    words += ["--parallel", str(request.strategy), "--output-dir", str(request.output)]
    words += [word for setting in request.settings for word in ("--set", setting)]
    words += [word for place in request.probes for word in ("--probes", str(place))]
    words += ["--resume"] if resume else []
    subprocess.run([sys.executable, str(ROOT / "benchmark.py"), "--json", *words], stdout=subprocess.DEVNULL, check=False)


def run_torchtitan(request: RunRequest, earlier: RunResult | None) -> str | None:
    """Run torchtitan once, unless an earlier run is the same; returns why it cannot run."""
    try:
        session = prepare(request)
        if earlier is None or not is_run_of(session.plans[0], earlier):
            run_plan(session, session.plans[0], quiet=False)
    except UserError as error:
        return error.what
    return None


def is_run_of(plan: RunPlan, earlier: RunResult) -> bool:
    """Return whether a result is a complete run of this plan, and not of another batch or other GPUs."""
    evidence = earlier.run.evidence
    if not earlier.run.counts or evidence is None or len(earlier.steps) != plan.steps:
        return False
    return not mismatches(plan, evidence)


def newest(folder: Path) -> RunResult | None:
    """Return a folder's last run: earlier ones were interrupted, or had another plan."""
    found, _ = load_results([folder]) if folder.exists() else ([], [])
    return max(found, key=lambda result: result.run.started_at or "", default=None)


def measure_layout(layout: Layout, options: argparse.Namespace, ranks: int) -> list[Row]:
    """Alternate between the programs for all rounds."""
    rows = [Row(layout=layout, program=name) for name in (options.engine, PEER, TRANSFORMER_ENGINE)]
    places = ([], [], [])
    for number in range(options.rounds):
        name = layout.name + (f"-{number + 1}" if number else "")
        folders = (options.output / name, options.output / PEER / name, options.output / TRANSFORMER_ENGINE / name)
        for place, folder in zip(places, folders, strict=True):
            place.append(folder)
        # ./benchmark.py recognises earlier runs of the same plan itself
        run_engine(request_of(layout, options, ranks, places[0][-1]), resume=options.resume)
        if options.transformer_engine:
            request = request_of(layout, options, ranks, places[2][-1])
            layers = f"platform_optimizations.{options.platform}.engine_options.layers=transformer_engine"
            run_engine(replace(request, settings=(*request.settings, layers)), resume=options.resume)
        changes = {"engine": PEER, "steps": max(options.steps, options.peer_steps)}
        peer = argparse.Namespace(**{**vars(options), **changes})
        earlier = newest(places[1][-1]) if options.resume else None
        if options.torchtitan and rows[1].why_none is None:
            request = replace(request_of(layout, peer, ranks, places[1][-1]), data="mock")
            rows[1].why_none = run_torchtitan(request, earlier)
    for row, place in zip(rows, places, strict=True):
        row.runs = [measure(result, MetricOptions()) for folder in place if (result := newest(folder)) is not None]
    if rows[0].group and rows[1].group:  # the clocks differ: torchtitan times itself, between two of its log lines
        rows[0].faster = verdict(rows[1].group, rows[0].group, Question(even_if_different=True)).ratio
    return [rows[0], *(rows[1:2] if options.torchtitan else ()), *(rows[2:] if options.transformer_engine else ())]


def cells(row: Row) -> list[str]:
    """Return one line of the table."""
    group = row.group
    if group is None:
        failed = [item.not_counted for item in row.runs if item.not_counted]
        return [row.layout.name, row.program, row.why_none or "; ".join(failed) or "no result"] + [""] * (len(HEADER) - 3)
    run, metrics = group.run, [item.metrics for item in group.runs if item.metrics]
    mfu = group_estimate(group, lambda made: made.mfu)
    first = [item.result.steps[0].ended_at_seconds for item in group.runs]
    steps = "+".join(str(made.window.steps) for made in metrics)
    expert = f" EP{run.expert_parallel}" if run.expert_parallel not in {None, 1} else ""
    return [
        row.layout.name,
        row.program,
        f"TP{run.tensor_parallel} PP{run.pipeline_parallel}{expert} DP{run.data_parallel} MBS{run.micro_batch_sequences}"
        f" s{run.sequence_tokens} {run.matmul_dtype}",
        with_interval(group_estimate(group, lambda made: made.tokens_per_second_per_gpu), units.count),
        with_interval(group_estimate(group, lambda made: made.model_flops_per_second_per_gpu), teraflops),
        units.percent(mfu.value) if mfu else units.ABSENT,
        units.gibibytes(max(made.peak_memory_bytes or made.peak_reserved_bytes or 0 for made in metrics) or None),
        units.seconds(max(value for value in first if value)) if any(first) else units.ABSENT,
        steps,
        target_cell(row, group),
        with_interval(row.faster, lambda value: f"{value:.3f}x") if row.faster else units.ABSENT,
    ]


def teraflops(value: float) -> str:
    """Format TFLOP/s without the unit, which the column names."""
    return f"{value / 1e12:.0f}" if value >= 1e13 else units.significant(value / 1e12)


def target_cell(row: Row, group: Group) -> str:
    """Format the share of the target reached, for the embedded engine on the GPUs that the target is for."""
    share = share_of_target(row, group)
    return units.ABSENT if share is None else units.percent(share)


def share_of_target(row: Row, group: Group) -> float | None:
    """Return the share of the target reached; None without a target, and for other programs and machines."""
    machine, layout = group.run.machine, row.layout
    if row.program != EMBEDDED or machine.accelerator != "NVIDIA H200" or machine.gpus != (layout.gpus or MEANT_FOR):
        return None
    if layout.target_mfu:
        mfu = group_estimate(group, lambda made: made.mfu)
        return mfu.value / layout.target_mfu if mfu else None
    rate = group_estimate(group, lambda made: made.tokens_per_second_per_gpu)
    wanted = layout.target_tokens_per_second_per_gpu
    return rate.value / wanted if rate and wanted else None


def document(row: Row) -> dict:
    """Return a line of the table as data."""
    group = row.group
    return {
        "layout": as_document(row.layout),
        "program": row.program,
        "runs": [as_document(item.result.run) for item in row.runs],
        "metrics": [as_document(item.metrics) for item in row.runs if item.metrics],
        "left_out_because": row.why_none or (None if group else cells(row)[2]),
        "share_of_target": share_of_target(row, group) if group else None,
        "times_as_fast_as_torchtitan": None if row.faster is None else as_document(row.faster),
    }


def parsed() -> argparse.Namespace:
    """Parse the command line, with this machine's platform as the default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/engine-speed"))
    parser.add_argument(
        "--only", help="comma-separated names, or patterns as moe_*: " + ", ".join(layout.name for layout in LAYOUTS)
    )
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument(
        "--rounds", type=int, choices=range(1, 100), metavar="N", default=1, help="runs of each layout by each program (1)"
    )
    parser.add_argument("--engine", default=EMBEDDED)
    parser.add_argument("--resume", action="store_true", help="keep existing runs and add the missing ones")
    parser.add_argument("--peer-steps", type=int, default=20, help="of torchtitan, which takes longer to reach its speed (20)")
    parser.add_argument("--no-torchtitan", action="store_false", dest="torchtitan", help="without torchtitan")
    parser.add_argument("--transformer-engine", action="store_true", help="also run each layout with Transformer Engine's layers")
    parser.add_argument("--platform", choices=("nvidia", "amd", "cpu"), help="default: what this machine is")
    parser.add_argument("--gpus", type=int, help="use fewer than there are; on a CPU, processes")
    parser.add_argument("--equal-work", action="store_true", help="scale the global batches, meant for 4 GPUs, to those here")
    parser.add_argument("--probes", type=Path, action="append", default=[], help="of this machine, for the predictions")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    options = parser.parse_args()
    machine = this_machine()
    options.platform = options.platform or (PLATFORM_OF[machine.platform] if machine else "nvidia")
    here = machine.gpus_per_node if machine and machine.gpus_per_node else 0
    options.gpus = options.gpus or here
    names = [layout.name for layout in LAYOUTS]
    wanted = options.only.split(",") if options.only else ["*"]
    if unknown := [pattern for pattern in wanted if not fnmatch.filter(names, pattern)]:
        parser.error(f"there is no layout {unknown[0]}")
    found = dict.fromkeys(name for pattern in wanted for name in fnmatch.filter(names, pattern))
    chosen = [layout for name in found for layout in LAYOUTS if layout.name == name]
    options.layouts = [layout.with_equal_work(options.gpus) if options.equal_work else layout for layout in chosen]
    return options


def main() -> int:
    """Run the table. Returns 1 if a run of the engine did not count."""
    options = parsed()
    rows: list[Row] = []
    for requested in options.layouts:
        ranks = requested.ranks(options.gpus)
        if ranks is None:
            rows.append(Row(layout=requested, program=options.engine, why_none=f"left out: not for {options.gpus} GPUs"))
            continue
        layout = on_cpu(requested, ranks) if options.platform == "cpu" else requested
        rows += measure_layout(layout, options, ranks)
        print("\n".join("  ".join(filter(None, cells(row))) for row in rows[-3:]), file=sys.stderr, flush=True)
        text = json.dumps([document(row) for row in rows], indent=2, allow_nan=False)
        write_atomically(options.output / "engine_speed.json", text + "\n")
    print(columns(HEADER, [cells(row) for row in rows], left=3))
    return 1 if any(row.program == options.engine and row.why_none is None and row.group is None for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; --resume goes on from here", file=sys.stderr)
        sys.exit(130)
