"""Measure an accelerator from bare operations to small training loops, and write one page about it.

    python -m tprimat.cli.suite
    python -m tprimat.cli.suite --output output --time-budget 600
    python -m tprimat.cli.suite --output output --page-only

A second start goes on where the first one stopped: what probes.jsonl holds for this machine and software is not measured again,
nor is a training done again that has a run which counts.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli import finetune, torchtune
from tprimat.cli.console import outlasting
from tprimat.cli.options import at_least_one
from tprimat.cli.qwen3 import Training
from tprimat.engines.base import Command
from tprimat.errors import ConfigError, RecordError, UserError
from tprimat.runner.probes import FILE_NAME, RANKS_ON_A_PROCESSOR, tell
from tprimat.runner.ranks import MOST_SECONDS, environment, supervise

ORDER = ("gemm", "memory", "attention", "mlp", "transformer", "collectives", "ddp")
"""What other results are held against comes first, in case the time does not suffice."""
STAGES = (*ORDER, "qwen3", "torchtune", "finetune")
"""finetune: both trainings of Qwen3 8B."""
SKIP = f"leave these out: {', '.join(STAGES)} (the two before it), {', '.join(finetune.NAMES)}"
BUDGET = f"begin nothing after this many seconds, and stop a training there (without it, a training after {MOST_SECONDS:.0f})"
PAGE_NAME = "suite.md"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tprimat.cli.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="where records and page go (./output)")
    made.add_argument("--time-budget", type=float, metavar="S", help=BUDGET)
    made.add_argument("--skip", default="", metavar="LIST", help=SKIP)
    made.add_argument("--ranks", type=int, metavar="N", help="of collectives, ddp and Qwen3 (every GPU; 2 on a CPU)")
    made.add_argument("--train-steps", type=at_least_one, default=20, metavar="N", help="of each training of Qwen3 8B (20)")
    made.add_argument("--checkpoint", metavar="DIR", help="of Qwen3 8B, to fine-tune it through torchtune; random: made here")
    made.add_argument("--page-only", action="store_true", help="measure nothing; write the page from the records")
    sizes = made.add_mutually_exclusive_group()
    sizes.add_argument("--small", dest="size", action="store_const", const="--small", help="small sizes (on a CPU: the default)")
    sizes.add_argument("--full", dest="size", action="store_const", const="--full", help="full sizes even on a CPU")
    return made


def measure_kind(kind: str, options: argparse.Namespace, seconds: float | None) -> bool:
    """One probe in a process of its own, so that one that crashes takes no other with it. False: the user stopped it."""
    arguments = [kind, "--resume", "--json", "--output", str(options.output)]
    arguments += [options.size] if options.size else []
    arguments += ["--ranks", str(options.ranks)] if options.ranks and kind in {"collectives", "ddp"} else []
    arguments += ["--time-budget", str(seconds)] if seconds is not None else []
    command = Command(argv=(sys.executable, "-m", "tprimat.cli.probe", *arguments), environment=environment(1))
    ending = supervise(command, lambda line: None if line.startswith("{") else tell(line))
    if ending.exit_code:
        tell(f"{kind} ended with status {ending.exit_code}; what it measured stands.")
    return ending.stopped is None or ending.stopped.outcome != "interrupted"


def check_skip(text: str) -> set[str]:
    """Names of stages.

    Raises:
        ConfigError: one of them does not exist.
    """
    names = set(filter(None, (part.strip() for part in text.split(","))))
    for name in sorted(names):
        if name not in (*STAGES, *finetune.NAMES):
            raise ConfigError(f"There is no probe {name!r}.", where="--skip", fix=", ".join((*STAGES, *finetune.NAMES)))
    return names | {"qwen3", "torchtune"} if "finetune" in names else names


def measure(options: argparse.Namespace, left_out: set[str], ends: float | None) -> bool:
    """Everything that was not left out, as far as the time suffices. False: the user stopped it."""
    for kind in ORDER:
        left = None if ends is None else ends - time.monotonic()
        if kind in left_out or (left is not None and left <= 0):
            tell(f"{kind} is left out{'' if kind in left_out else ': the time budget is spent'}.")
            continue
        tell(f"{kind}:")
        if not measure_kind(kind, options, left):
            return False
    return True


def train(options: argparse.Namespace, left_out: set[str], ends: float | None) -> bool:
    """Qwen3 8B on the embedded engine, and through torchtune where it and a checkpoint are here. False: the user stopped it."""
    from tprimat.hardware.nodes import this_machine

    machine = this_machine()
    ranks = options.ranks or (machine.gpus_per_node if machine and machine.gpus_per_node else RANKS_ON_A_PROCESSOR)
    training = Training(machine=machine, ranks=ranks, steps=options.train_steps, seconds=None)
    return finetune.run(finetune.jobs_of(options.output, training, options.checkpoint, left_out), options.output, training, ends)


def write_page(options: argparse.Namespace, reason: str | None) -> Path:
    """The page, from the records; only why torchtune was not run is of this moment.

    Raises:
        RecordError: there is no record.
    """
    from tprimat.records.files import write_atomically
    from tprimat.records.store import read_probes
    from tprimat.report.suite import page

    file = options.output / FILE_NAME
    probes = read_probes(file)
    if not probes and not finetune.has_records(options.output):
        raise RecordError(f"{file} holds no measurement.", where=str(file), fix="run the suite without --page-only")
    target: Path = options.output / PAGE_NAME
    write_atomically(target, page(probes, (finetune.section(options.output, reason),)))
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for a mistake that the user can mend, 130 where the user stopped it; what was measured is on the page."""
    options = parser().parse_args(argv)
    stopped = False
    try:
        left_out = check_skip(options.skip)
        reason = None
        if not options.page_only:
            ends = None if options.time_budget is None else time.monotonic() + options.time_budget
            stopped = not (measure(options, left_out, ends) and train(options, left_out, ends))
            reason = torchtune.why_not(options.checkpoint)
        print(write_page(options, reason))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if stopped:
        tell("stopped: the same command goes on from here")
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(outlasting(main))
