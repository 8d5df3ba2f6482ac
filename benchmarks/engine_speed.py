#!/usr/bin/env python3
"""Measure an engine (the embedded one, or --engine nemo) under one layout after another, in turn with its peers.

python3 benchmarks/engine_speed.py --output output/engine-speed
python3 benchmarks/engine_speed.py --gpus 2 --against transformer_engine,torchtitan,nemo --rounds 3
python3 benchmarks/engine_speed.py --only dp_mbs4,tp2_mbs4 --steps 14 --against none
python3 benchmarks/engine_speed.py --gpus 2 --equal-work    give each of two GPUs the work of one of four
python3 benchmarks/engine_speed.py --rounds 3 --time-limit 600 --resume    where a command may take ten minutes: repeat it
python3 benchmarks/engine_speed.py --platform cpu --gpus 2 --only dp_mbs4 --steps 3 --against none    only check that it works

The peers are `transformer_engine`, the embedded engine with Transformer Engine's layers, which is Megatron-LM as NVIDIA runs it;
`megatron-lm`, the program of a clone (MEGATRON_PATH); `bridge`; `torchtitan`; and `nemo`, which has a Python of its own
(`make nemo`) and uses Transformer Engine's loss. Where they are asked for: `megatron-graphs` and
`transformer_engine-graphs`, the same programs with CUDA graphs.

All rounds of a layout come before the next layout, and in each round every program runs once. An interrupted series thus leaves
whole comparisons of its first layouts, and a drift of the machine affects all programs. A run that was broken off does not
count, and --resume makes it again. A failure counts as a result: delete its folder to try again. A program that has run out of
memory does not run in later rounds of the layout. With --time-limit no run starts that would end too late, judged by the longest
of its layout and program so far, or of its program, or of all.

Each run leaves its records under --output; the table is printed and written to engine_speed.json from those records. Layouts that
do not fit the GPUs here are left out and listed, and so is what a peer refuses, with its reason.
"""

import argparse
import fnmatch
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from speed_layouts import LAYOUTS, MEANT_FOR, Layout  # noqa: E402
from speed_programs import (  # noqa: E402
    FINDERS,
    Job,
    Program,
    expected_seconds,
    is_made,
    jobs_of,
    make,
    newest,
    peers,
    program_named,
    request_of,
    seconds_of,
)

from tprimat.analyze.compare import Question, Verdict, verdict  # noqa: E402
from tprimat.analyze.groups import Group, Measured, group_estimate, group_runs, measure  # noqa: E402
from tprimat.analyze.metrics import MetricOptions  # noqa: E402
from tprimat.core import units  # noqa: E402
from tprimat.core.accelerators import PLATFORM_OF  # noqa: E402
from tprimat.core.errors import UserError  # noqa: E402
from tprimat.core.statistics import BETWEEN_RUNS  # noqa: E402
from tprimat.engines import megatron  # noqa: E402
from tprimat.hardware.nodes import this_machine  # noqa: E402
from tprimat.records.schema import RunMetrics  # noqa: E402
from tprimat.records.store import as_document, write_atomically  # noqa: E402
from tprimat.report.tables import columns, with_interval  # noqa: E402
from tprimat.report.words import not_counted_words  # noqa: E402

HEADER = ("layout", "program", "split", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "memory", "first step", "n", "target")
RATIO = "{} / peer"
AGAIN = "call again with --resume"
"""Said where the time limit left runs to make; whole_machine.py looks for it."""
EMBEDDED = megatron.ENGINE.name
COMPARED = Question(varying=("clock",))
"""Programs time themselves in their own ways."""


@dataclass(kw_only=True)
class Row:
    """The runs of one program under one layout."""

    layout: Layout
    program: str
    runs: list[Measured] = field(default_factory=list)
    why_none: str | None = None
    """In words why the program did not run; None where it did."""
    left_out: bool = False
    """It was not to run: no failure."""
    compared: Verdict | None = None
    """The engine with this peer."""

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether it did in an earlier round: it would do so again."""
        return any(item.result.run.outcome == "out_of_memory" for item in self.runs)

    @property
    def group(self) -> Group | None:
        """The runs that count, if they are alike."""
        groups = group_runs(self.runs)
        return groups[0] if len(groups) == 1 else None


class Series:
    """The runs of one call, and those of earlier calls that it continues."""

    def __init__(self, options: argparse.Namespace, programs: list[Program]) -> None:
        self._options = options
        self._programs = programs
        self._ends = time.monotonic() + options.time_limit if options.time_limit else None
        self._seconds: list[tuple[Job, float]] = []
        self.done = 0
        """Runs that ended or were refused, of all calls."""
        self.too_long: float | None = None
        """Expected seconds of the first run that the time limit left no room for."""

    def rows_of(self, layout: Layout, ranks: int) -> list[Row]:
        """Make the runs of a layout that are missing, as far as the time goes, and read all of them."""
        rows = {program.name: Row(layout=layout, program=program.name) for program in self._programs}
        jobs = list(jobs_of(layout, ranks, self._programs, self._options))
        for job in jobs:
            row = rows[job.program.name]
            if row.why_none is None and not row.ran_out_of_memory and not self._make(job, row):
                continue
            self.done += 1
            if row.why_none is None and (result := newest(job.folder)) is not None:
                row.runs.append(measure(result, MetricOptions()))
                if (seconds := seconds_of(result)) is not None:
                    self._seconds.append((job, seconds))
        first, *others = rows.values()
        for row in rows.values():
            row.left_out = self.too_long is not None and not row.runs and row.why_none is None
            row.why_none = "not yet run" if row.left_out else row.why_none
        for row in others:
            if first.group and row.group:
                row.compared = verdict(row.group, first.group, COMPARED)
        return list(rows.values())

    def _make(self, job: Job, row: Row) -> bool:
        """Make a run unless an earlier call did; a refusal goes into the row. Return False where no time is left for it."""
        request, resume = request_of(job, self._options), self._options.resume
        if resume and is_made(job, request, newest(job.folder), self._options.platform):
            return True
        expected = expected_seconds(job, self._seconds)
        if self.too_long is None and self._ends is not None and time.monotonic() + (expected or 0) > self._ends:
            self.too_long = expected or 0
        if self.too_long is not None:
            return False
        row.why_none = make(job, request, resume=resume)
        return True


def on_cpu(layout: Layout, ranks: int) -> Layout:
    """Return the same split with little work, in fp32."""
    replicas = ranks // (layout.tensor * layout.pipeline * layout.context)
    little = {"micro_batch": 1, "global_batch": 4 * replicas, "sequence": 64, "layers": layout.layers and 2}
    return replace(layout, **little, precision="fp32", optimizer_states="fp32")


def cells(row: Row) -> list[str]:
    """Return one line of the table."""
    group = row.group
    if group is None:
        failed = dict.fromkeys(not_counted_words(item) for item in row.runs if item.not_counted)
        unlike = "the runs differ in more than time: start a new --output" if len(group_runs(row.runs)) > 1 else "no result"
        return [row.layout.name, row.program, row.why_none or "; ".join(failed) or unlike] + [""] * (len(HEADER) - 2)
    run, metrics = group.run, [item.metrics for item in group.runs if item.metrics]
    mfu = group_estimate(group, lambda made: made.mfu)
    first = [item.result.steps[0].ended_at_seconds for item in group.runs]
    steps = "+".join(str(made.window.steps) for made in metrics)
    ran = run.ran
    expert = f" EP{ran.expert_parallel}" if ran.expert_parallel not in {None, 1} else ""
    return [
        row.layout.name,
        row.program,
        f"TP{ran.tensor_parallel} PP{ran.pipeline_parallel}{expert} DP{ran.data_parallel} MBS{ran.micro_batch_sequences}"
        f" s{ran.sequence_tokens} {ran.matmul_dtype}",
        with_interval(group_estimate(group, lambda made: made.tokens_per_second_per_gpu), units.count),
        with_interval(group_estimate(group, lambda made: made.model_flops_per_second_per_gpu), teraflops),
        units.percent(mfu.value) if mfu else units.ABSENT,
        memory_cell(metrics),
        units.seconds(max(value for value in first if value)) if any(first) else units.ABSENT,
        steps,
        target_cell(row, group),
        ratio_cell(row.compared),
    ]


def memory_cell(metrics: list[RunMetrics]) -> str:
    """Format the peak over all runs of what tensors took, or of what the allocator reserved where a program tells only that."""
    used = [made.peak_memory_bytes for made in metrics if made.peak_memory_bytes]
    reserved = [made.peak_reserved_bytes for made in metrics if made.peak_reserved_bytes]
    return units.gibibytes(max(used)) if used else f"{units.gibibytes(max(reserved))} reserved" if reserved else units.ABSENT


def ratio_cell(compared: Verdict | None) -> str:
    """Format the throughput of the engine over that of a peer, with its interval, or say why the two are not compared."""
    if compared is None:
        return units.ABSENT
    if compared.ratio is None:
        return "other " + ", ".join(trait.name for trait in compared.differences)
    return with_interval(compared.ratio, lambda value: f"{value:.3f}x")


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


def notes(rows: list[Row], rounds: int) -> list[str]:
    """Return what a reader of the table must know of its intervals and clocks."""
    lines = []
    if rounds == 1 and any(row.compared for row in rows):
        lines.append(
            "One round: intervals of tokens/s are those within a run; those of ratios assume that runs differ by "
            f"{units.percent(BETWEEN_RUNS)}, or as their steps do. --rounds 3 measures it."
        )
    clocks = {row.program for row in rows if row.compared and any(trait.key == "clock" for trait in row.compared.traits)}
    lines += [
        f"{name} times itself, on one rank and from one log line to the next; the engine from the end of one step to the end of "
        "the next, on the slowest rank."
        for name in sorted(clocks)
    ]
    return lines


def document(row: Row) -> dict:
    """Return a line of the table as data."""
    group, compared = row.group, row.compared
    return {
        "layout": as_document(row.layout),
        "program": row.program,
        "runs": [as_document(item.result.run) for item in row.runs],
        "metrics": [as_document(item.metrics) for item in row.runs if item.metrics],
        "left_out_because": None if group else cells(row)[2],
        "share_of_target": share_of_target(row, group) if group else None,
        "engine_times_as_fast": as_document(compared.ratio) if compared and compared.ratio else None,
        "differs_in": [trait.name for trait in compared.traits] if compared else [],
    }


def parser() -> argparse.ArgumentParser:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        default=Path("output/engine-speed"),
        help="for records and table (output/engine-speed)",
    )
    parser.add_argument(
        "--only", help="comma-separated names, or patterns such as 'moe_*': " + ", ".join(layout.name for layout in LAYOUTS)
    )
    parser.add_argument("--steps", type=int, metavar="N", default=14, help="optimizer steps of each run (14)")
    parser.add_argument(
        "--rounds", type=int, choices=range(1, 100), metavar="N", default=1, help="runs of each layout by each program (1)"
    )
    parser.add_argument("--engine", metavar="NAME", default=EMBEDDED, help=f"what is measured ({EMBEDDED})")
    parser.add_argument("--against", metavar="NAME[,NAME]", help=f"peers: {', '.join(FINDERS)}, or none (all that are installed)")
    parser.add_argument(
        "--nemo-python", type=Path, metavar="PATH", help="the Python with NeMo (.venv-nemo/bin/python, else this one)"
    )
    parser.add_argument("--resume", action="store_true", help="keep the runs that ended, and make the others")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no run that would end later")
    parser.add_argument(
        "--peer-steps", type=int, metavar="N", default=20, help="steps of torchtitan, which takes longer to reach its speed (20)"
    )
    parser.add_argument("--platform", choices=("nvidia", "amd", "cpu"), help="default: what this machine is")
    parser.add_argument("--gpus", type=int, metavar="N", help="use fewer than there are; on a CPU, processes")
    parser.add_argument("--equal-work", action="store_true", help="scale the global batches, meant for 4 GPUs, to those here")
    parser.add_argument(
        "--probes",
        type=Path,
        action="append",
        metavar="FOLDER",
        default=[],
        help="results of `tprimat probe` here, for predictions",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="override a key of config.yaml in every run",
    )
    return parser


def parsed() -> tuple[argparse.Namespace, list[Layout], list[Program]]:
    """Parse the command line, with this machine's platform as the default: flags, layouts, and the engine before its peers."""
    flags = parser()
    options = flags.parse_args()
    machine = this_machine()
    options.platform = options.platform or (PLATFORM_OF[machine.platform] if machine else "nvidia")
    here = machine.gpus_per_node if machine and machine.gpus_per_node else 0
    options.gpus = options.gpus or here
    names = [layout.name for layout in LAYOUTS]
    wanted = options.only.split(",") if options.only else ["*"]
    if unknown := [pattern for pattern in wanted if not fnmatch.filter(names, pattern)]:
        flags.error(f"there is no layout {unknown[0]}")
    selected = dict.fromkeys(name for pattern in wanted for name in fnmatch.filter(names, pattern))
    chosen = [layout for name in selected for layout in LAYOUTS if layout.name == name]
    chosen = [layout.with_equal_work(options.gpus) if options.equal_work else layout for layout in chosen]
    against = (options.against or "none").split(",")
    if unknown := [name for name in against if name not in {*FINDERS, "none", EMBEDDED}]:
        flags.error(f"--against has no program {unknown[0]!r}; one of: {', '.join(FINDERS)}, or none")
    try:
        return options, chosen, [program_named(options.engine, options), *peers(options)]
    except UserError as error:
        flags.error(str(error))


def main() -> int:
    """Run the table. Returns 1 if a run of the engine did not count."""
    options, layouts, programs = parsed()
    series = Series(options, programs)
    rows: list[Row] = []
    wanted = 0
    for requested in layouts:
        ranks = requested.ranks(options.gpus)
        if ranks is None:
            why = f"left out: not for {options.gpus} GPUs"
            new_rows = [Row(layout=requested, program=options.engine, why_none=why, left_out=True)]
        else:
            wanted += len(programs) * options.rounds
            new_rows = series.rows_of(on_cpu(requested, ranks) if options.platform == "cpu" else requested, ranks)
        rows += new_rows
        print("\n".join("  ".join(filter(None, cells(row))) for row in new_rows), file=sys.stderr, flush=True)
        text = json.dumps([document(row) for row in rows], indent=2, allow_nan=False)
        write_atomically(options.output / "engine_speed.json", text + "\n")
    print(columns((*HEADER, RATIO.format(options.engine)), [cells(row) for row in rows], left=3))
    print("".join(f"\n{note}\n" for note in notes(rows, options.rounds)), end="")
    if series.too_long is not None:
        print(f"\nstopped after {series.done} of {wanted} runs: {AGAIN} (the next run may take {units.seconds(series.too_long)})")
    return 1 if any(row.program == options.engine and not row.left_out and row.group is None for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; --resume continues from here", file=sys.stderr)
        sys.exit(130)
