"""Train Qwen3 8B on the embedded engine, fine-tune it through torchtune, and write one page about both.

    python3 -m benchmarks.finetune_qwen3
    python3 -m benchmarks.finetune_qwen3 --checkpoint random --time-budget 3600
    python3 -m benchmarks.finetune_qwen3 --output output --page-only

A second call continues where the first one stopped: a training that has a run that counts is not repeated.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.finetune_qwen3.embedded import LIMIT_FLAG, Training
from benchmarks.finetune_qwen3.jobs import EMBEDDED, GROUPS, TORCHTUNE, jobs, log, run_jobs
from benchmarks.finetune_qwen3.section import section
from benchmarks.finetune_qwen3.torchtune_recipes import torchtune_refusal
from tprimat.core.errors import ConfigError, UserError
from tprimat.hardware.nodes import this_machine
from tprimat.launch.process import DEFAULT_LIMIT_SECONDS
from tprimat.records.store import write_atomically

PAGE_NAME = "finetune_qwen3.md"
RANKS_ON_A_CPU = 2
SKIPPABLE = (*GROUPS, *EMBEDDED, *TORCHTUNE)
LIMIT_HELP = (
    f"start nothing after this many seconds, and stop a training then (default: {DEFAULT_LIMIT_SECONDS:.0f} for each training)"
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.finetune_qwen3", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output"), metavar="DIR", help="folder of records and page (default: ./output)"
    )
    parser.add_argument(LIMIT_FLAG, type=float, metavar="S", help=LIMIT_HELP)
    parser.add_argument("--skip", default="", metavar="LIST", help=f"trainings to skip, of {', '.join(SKIPPABLE)}")
    parser.add_argument("--ranks", type=int, metavar="N", help="devices (default: every GPU; 2 processes on a CPU)")
    parser.add_argument("--train-steps", type=int, default=20, metavar="N", help="steps of each training (default: 20)")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="Qwen3 8B's weights for torchtune, or random; without it, torchtune is left out"
    )
    parser.add_argument("--page-only", action="store_true", help="train nothing; write the page from the records")
    options = parser.parse_args(argv)
    if options.train_steps < 1:
        parser.error("--train-steps must be at least 1")
    return options


def jobs_to_skip(text: str) -> set[str]:
    """Read a comma-separated list of jobs and groups of jobs.

    Raises:
        ConfigError: a job of this name does not exist.
    """
    names = set(filter(None, (part.strip() for part in text.split(","))))
    for name in sorted(names):
        if name not in SKIPPABLE:
            raise ConfigError(f"There is no training {name!r}.", where="--skip", fix=", ".join(SKIPPABLE))
    return {job for name in names for job in GROUPS.get(name, (name,))}


def train(options: argparse.Namespace) -> bool:
    """Run the trainings; False if the user stopped it."""
    skip = jobs_to_skip(options.skip)
    ends = None if options.time_budget is None else time.monotonic() + options.time_budget
    machine = this_machine()
    ranks = options.ranks or (machine.gpus_per_node if machine and machine.gpus_per_node else RANKS_ON_A_CPU)
    training = Training(machine=machine, ranks=ranks, steps=options.train_steps, limit_seconds=None)
    return run_jobs(jobs(options.output, training, options.checkpoint, skip), options.output, training, ends)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for a user's mistake, 130 where the user stopped it; the page holds what was measured."""
    options = arguments(argv)
    stopped, refusal = False, None
    try:
        if not options.page_only:
            stopped = not train(options)
            refusal = torchtune_refusal(options.checkpoint)
        page = options.output / PAGE_NAME
        write_atomically(page, section(options.output, refusal).removeprefix("#") + "\n")
        print(page)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if stopped:
        log("stopped; the same command continues from here")
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
