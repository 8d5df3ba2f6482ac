"""Measure what the bare operations reach on this machine.

python -m tprimat.cli.probe gemm,memory
python -m tprimat.cli.probe all --output output --time-budget 240
python -m tprimat.cli.probe gemm --dtype bf16,fp8 --json
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.console import outlasting
from tprimat.cli.workloads import configured
from tprimat.errors import ConfigError, UserError
from tprimat.hardware.nodes import this_machine
from tprimat.runner.ranks import run_ranks

if TYPE_CHECKING:
    from tprimat.probe.case import Bench
    from tprimat.records.schema import ProbeRecord

SINGLE = ("gemm", "attention", "memory", "mlp", "transformer")
TOGETHER = ("collectives", "ddp")
KINDS = (*SINGLE, *TOGETHER)
RANKS_ON_A_PROCESSOR = 2
FILE_NAME = "probes.jsonl"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tprimat.cli.probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("kinds", help=f"comma-separated: {', '.join(KINDS)}, or all")
    made.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help=f"where {FILE_NAME} is kept (./output)")
    made.add_argument("--time-budget", type=float, metavar="S", help="begin no measurement after this many seconds")
    made.add_argument("--dtype", metavar="LIST", help="of matrix products: bf16,fp8,fp16,tf32,fp32 (all)")
    made.add_argument("--config", type=Path, metavar="FILE", help="whose models' matrix products are measured (config.yaml)")
    made.add_argument("--ranks", type=int, metavar="N", help="of collectives and ddp (every GPU; 2 on a CPU)")
    made.add_argument("--resume", action="store_true", help=f"skip what {FILE_NAME} holds for this machine and software")
    made.add_argument("--json", action="store_true", help="print the records, one a line")
    sizes = made.add_mutually_exclusive_group()
    sizes.add_argument("--small", dest="small", action="store_true", default=None, help="small sizes (on a CPU: the default)")
    sizes.add_argument("--full", dest="small", action="store_false", help="full sizes even on a CPU")
    return made


def chosen_kinds(text: str) -> tuple[str, ...]:
    """The probes that a user named.

    Raises:
        ConfigError: one of them does not exist.
    """
    if text == "all":
        return KINDS
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"There is no probe {name!r}.", where="--probe", fix=f"one or more of {', '.join(KINDS)}, or all")
    if not names:
        raise ConfigError("No probe is named.", where="--probe", fix=f"one or more of {', '.join(KINDS)}, or all")
    return names


def tell(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> Iterator["ProbeRecord"]:
    """Every probe that was asked for, record by record."""
    ends = None if options.time_budget is None else time.monotonic() + options.time_budget
    for kind in chosen_kinds(options.kinds):
        left = None if ends is None else max(0.0, ends - time.monotonic())
        yield from measure_on_ranks(kind, options, left) if kind in TOGETHER else measure_here(kind, options, left)


def measure_here(kind: str, options: argparse.Namespace, seconds: float | None) -> Iterator["ProbeRecord"]:
    """In this process, on one device."""
    from tprimat.probe import case, catalogue, gemm

    dtypes = tuple(options.dtype.split(",")) if options.dtype else gemm.DTYPES
    bench = opened_bench(options.small)
    workloads = configured(options.config, bench.machine.platform) or gemm.DEFAULT_WORKLOADS
    choice = catalogue.Choice(dtypes=catalogue.check_dtypes(dtypes), workloads=workloads)
    notebook = case.open_notebook(options.output / FILE_NAME, resume=options.resume, seconds=seconds, tell=tell)
    yield from catalogue.PROBES[kind](choice, bench, notebook)
    case.tidy(bench)


@lru_cache(maxsize=1)
def opened_bench(small: bool | None) -> "Bench":
    """One for all probes: looking at a device starts a tool that follows its clock."""
    from tprimat.probe import case

    return case.open_bench(small=small, seen=this_machine())


def measure_on_ranks(kind: str, options: argparse.Namespace, seconds: float | None) -> Iterator["ProbeRecord"]:
    """In processes of their own, one for each rank, started through torchrun; they append to the same file."""
    from tprimat.probe import case, together
    from tprimat.records.store import read_probes

    file = options.output / FILE_NAME
    known = case.open_notebook(file, resume=options.resume, seconds=None, tell=tell).known
    for ranks in rank_counts(kind, options.ranks):
        if known and together.all_known(kind, ranks, known, small=options.small, seen=this_machine()):
            tell(f"{kind} on {ranks} ranks: everything is measured already.")
            continue
        if seconds is not None and seconds <= 0:
            tell(f"The time budget is spent: {kind} on {ranks} ranks is left.")
            return
        before, began = len(read_probes(file)), time.monotonic()
        failure = run_ranks("tprimat.cli.probe", worker_arguments(kind, options, seconds), ranks, tell)
        if failure:
            note_failure(kind, ranks, failure, options)
        yield from read_probes(file)[before:]
        seconds = None if seconds is None else seconds - (time.monotonic() - began)


def note_failure(kind: str, ranks: int, failure: str, options: argparse.Namespace) -> None:
    """Ranks that did not end well leave a record too; what they had measured before stands."""
    from tprimat.probe.case import Case, blank, keep, open_notebook

    case = Case(kind=kind, shape={"ranks": ranks}, dtype="bf16", prepare=lambda _: lambda: None)
    record = replace(blank(case, opened_bench(options.small)), error=failure)
    keep(record, open_notebook(options.output / FILE_NAME, resume=False, seconds=None, tell=tell))
    tell(f"{kind} on {ranks} ranks: {failure}")


def worker_arguments(kind: str, options: argparse.Namespace, seconds: float | None) -> list[str]:
    """The command line of a rank."""
    arguments = [kind, "--output", str(options.output)]
    arguments += ["--time-budget", str(seconds)] if seconds is not None else []
    arguments += ["--resume"] if options.resume else []
    return arguments + ([] if options.small is None else ["--small" if options.small else "--full"])


def rank_counts(kind: str, asked: int | None) -> list[int]:
    """How many ranks measure: collectives all of them, DDP 1, 2, 4 and so on, and all.

    Raises:
        ConfigError: more ranks than GPUs, or a collective of one.
    """
    from tprimat.probe.device import visible_gpus

    gpus = visible_gpus()
    ranks = asked or gpus or RANKS_ON_A_PROCESSOR
    if gpus and ranks > gpus:
        raise ConfigError(f"{ranks} ranks need {ranks} GPUs, and {gpus} are visible.", where="--ranks", fix=f"--ranks {gpus}")
    if kind == "ddp":
        return sorted({count for count in (1, 2, 4, 8) if count <= ranks} | {ranks})
    if ranks < 2:
        raise ConfigError("A collective operation needs 2 ranks.", why=f"{gpus} GPU is visible.", fix="leave collectives out")
    return [ranks]


def work_as_rank(options: argparse.Namespace) -> None:
    """One rank's part of the probes."""
    from tprimat.probe import case, together

    with together.process_group(options.small, this_machine()) as bench:
        notebook = case.open_notebook(options.output / FILE_NAME, resume=options.resume, seconds=options.time_budget, tell=tell)
        for kind in chosen_kinds(options.kinds):
            for _ in together.run_together(together.cases_here(kind, bench), bench, notebook):
                pass


def check_torch() -> None:
    """Probes are the one command that cannot do without it.

    Raises:
        ConfigError: it is not here.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("Probes need PyTorch.", fix="pip install torch, in the build that your accelerator needs")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 where ranks did not end well, 2 for a mistake in the command line."""
    options = parser().parse_args(argv)
    try:
        chosen_kinds(options.kinds)
        check_torch()
        from tprimat.probe.device import is_rank

        if is_rank():
            work_as_rank(options)
            return 0
        return show(measure(options), options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def show(records: Iterable["ProbeRecord"], options: argparse.Namespace) -> int:
    """Results on stdout. Exit status 1 where ranks did not end well; an operation that a device refuses is a result."""
    from tprimat.records.files import to_json

    began = datetime.now(timezone.utc).replace(microsecond=0)  # as records have it
    failed = 0
    measured = []
    for record in records:
        measured.append(record)
        failed += record.kind in TOGETHER and record.error is not None
        if options.json:
            print(to_json(record), flush=True)
    if measured and not options.json:
        print_tables(measured)
    new = sum(datetime.fromisoformat(record.started_at) >= began for record in measured)
    before = f" and {len(measured) - new} that were there" if new < len(measured) else ""
    tell(f"{new} measurements{before}; all samples are in {options.output / FILE_NAME}")
    return 1 if failed else 0


def print_tables(records: Sequence["ProbeRecord"]) -> None:
    """What was measured, kind by kind."""
    from tprimat.analyze.probes import newest_of_each
    from tprimat.report.suite import sections

    print("\n\n".join(sections(newest_of_each(records))))


if __name__ == "__main__":
    sys.exit(outlasting(main))
