"""Measure an accelerator from bare operations to small training loops, and write one page about it.

    python -m tprimat.cli.suite
    python -m tprimat.cli.suite --output output --time-budget 600
    python -m tprimat.cli.suite --output output --page-only

A second start goes on where the first one stopped: what probes.jsonl holds for this machine and software is not measured again.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli import finetune
from tprimat.cli.probe import FILE_NAME, tell
from tprimat.cli.ranks import environment, supervise
from tprimat.engines.base import Command
from tprimat.errors import ConfigError, RecordError, UserError

ORDER = ("gemm", "memory", "attention", "mlp", "transformer", "collectives", "ddp")
"""What other results are held against comes first, in case the time does not suffice."""
PAGE_NAME = "suite.md"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tprimat.cli.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="where records and page go (./output)")
    made.add_argument("--time-budget", type=float, metavar="S", help="begin no measurement after this many seconds")
    made.add_argument("--skip", default="", metavar="LIST", help=f"leave these out: {', '.join(ORDER)}, finetune")
    made.add_argument("--ranks", type=int, metavar="N", help="of collectives and ddp (every GPU; 2 on a CPU)")
    made.add_argument("--checkpoint", type=Path, metavar="DIR", help="of Qwen3 8B, to fine-tune it through torchtune")
    made.add_argument("--page-only", action="store_true", help="measure nothing; write the page from the records")
    sizes = made.add_mutually_exclusive_group()
    sizes.add_argument("--small", dest="size", action="store_const", const="--small", help="small sizes (on a CPU: the default)")
    sizes.add_argument("--full", dest="size", action="store_const", const="--full", help="full sizes even on a CPU")
    return made


def measure_kind(kind: str, options: argparse.Namespace, seconds: float | None) -> None:
    """One probe in a process of its own, so that one that crashes takes no other with it."""
    arguments = [kind, "--resume", "--json", "--output", str(options.output)]
    arguments += [options.size] if options.size else []
    arguments += ["--ranks", str(options.ranks)] if options.ranks and kind in {"collectives", "ddp"} else []
    arguments += ["--time-budget", str(seconds)] if seconds is not None else []
    command = Command(argv=(sys.executable, "-m", "tprimat.cli.probe", *arguments), environment=environment(1))
    ending = supervise(command, lambda line: None if line.startswith("{") else tell(line))
    if ending.exit_code:
        tell(f"{kind} ended with status {ending.exit_code}; the suite goes on.")


def check_skip(text: str) -> None:
    """Names of probes.

    Raises:
        ConfigError: one of them does not exist.
    """
    known = {*ORDER, "finetune"}
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in known:
            raise ConfigError(f"There is no probe {name!r}.", where="--skip", fix=", ".join((*ORDER, "finetune")))


def measure(options: argparse.Namespace) -> None:
    """Everything that was not left out, as far as the time suffices."""
    ends = None if options.time_budget is None else time.monotonic() + options.time_budget
    left_out = {name.strip() for name in options.skip.split(",")}
    for kind in ORDER:
        left = None if ends is None else ends - time.monotonic()
        if kind in left_out or (left is not None and left <= 0):
            tell(f"{kind} is left out.")
            continue
        tell(f"{kind}:")
        measure_kind(kind, options, left)


def fine_tune(options: argparse.Namespace) -> list[str]:
    """Qwen3 8B, where torchtune and a checkpoint are here; lines about what did not end well."""
    from tprimat.launch.cluster import this_machine

    machine = this_machine()
    ranks = options.ranks or (machine.gpus_per_node if machine else None)
    if "finetune" in options.skip or finetune.why_not(options.checkpoint) or machine is None or ranks is None:
        return []
    problems = finetune.run(tuple(finetune.MODES), options.output, options.checkpoint, ranks)
    return problems + finetune.read_logs(options.output, ranks, machine.accelerator)


def write_page(options: argparse.Namespace, problems: Sequence[str]) -> Path:
    """The page, from the records alone.

    Raises:
        RecordError: there is no record.
    """
    from tprimat.record.files import write_atomically
    from tprimat.record.store import read_probes
    from tprimat.report.suite import page

    file = options.output / FILE_NAME
    probes = read_probes(file)
    if not probes:
        raise RecordError(f"{file} holds no measurement.", where=str(file), fix="run the suite without --page-only")
    target: Path = options.output / PAGE_NAME
    write_atomically(target, page(probes, (finetune.section(options.output, finetune.why_not(options.checkpoint), problems),)))
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake that the user can mend."""
    options = parser().parse_args(argv)
    try:
        check_skip(options.skip)
        problems: list[str] = []
        if not options.page_only:
            measure(options)
            problems = fine_tune(options)
        print(write_page(options, problems))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
