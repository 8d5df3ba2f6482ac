"""./benchmark.py --scaling 1,2,4,8: the same strategy on rising numbers of GPUs, then what more of them gave."""

import argparse
import sys
from pathlib import Path

from tprimat.cli import scaling
from tprimat.errors import ConfigError
from tprimat.records.discover import PROBES_FILE
from tprimat.runner.session import Session, prepare
from tprimat.runner.sweep import Cell, Done, carry_out


def counts(text: str) -> list[int]:
    """'1,2,4,8' as rising numbers.

    Raises:
        ConfigError: something else, or a single number.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words) or len(set(words)) < 2:
        raise ConfigError(
            f"--scaling is {text!r}.", where="--scaling", why="It takes two or more numbers.", fix="--scaling 1,2,4,8"
        )
    return sorted({int(word) for word in words})


def sessions(options: argparse.Namespace) -> list[Session]:
    """One for each number of GPUs, with results in gpus-N of the output folder.

    Weak scaling keeps the work of a GPU: the configured global batch is that of the largest number, smaller ones get their
    share. Strong scaling divides the same batch.

    Raises:
        UserError: the strategy cannot run on one of the numbers; nothing has been started.
    """
    if options.gpus is not None:
        raise ConfigError("--gpus and --scaling exclude each other.", where="--gpus", fix="leave --gpus out")
    numbers = counts(options.scaling)
    largest = prepare(argparse.Namespace(**{**vars(options), "gpus": numbers[-1]}))
    whole = largest.plans[0].batch.global_batch_sequences
    made = []
    for gpus in numbers:
        batch = whole if options.scaling_mode == "strong" else share(whole, gpus, numbers[-1])
        probes = [*options.probes, *filter(Path.is_file, [largest.output / PROBES_FILE])]
        asked = {"gpus": gpus, "global_batch_size": batch, "output_dir": str(largest.output / f"gpus-{gpus}"), "probes": probes}
        made.append(prepare(argparse.Namespace(**{**vars(options), **asked})))
    return made


def share(whole: int, gpus: int, largest: int) -> int:
    """The global batch of a smaller number of GPUs.

    Raises:
        ConfigError: it is no whole number of sequences.
    """
    if whole * gpus % largest:
        raise ConfigError(
            f"A global batch of {whole} sequences on {largest} GPUs leaves no whole number for {gpus}.",
            where="--scaling",
            why="Weak scaling gives every GPU the same work.",
            fix=f"--global-batch-size {max(1, whole // largest) * largest}, or --scaling-mode strong",
        )
    return whole * gpus // largest


def run(made: list[Session], options: argparse.Namespace) -> tuple[list[Done], bool]:
    """Carry out all numbers.

    Returns:
        what was done, and whether everything counts.
    """
    cells = [Cell(session=session, plan=plan) for session in made for plan in session.plans]
    done = carry_out(cells, quiet=options.quiet, resume=options.resume, messages=sys.stderr)
    return done, len(done) == len(cells) and all(one.counts for one in done)


def analyze(made: list[Session], options: argparse.Namespace) -> bool:
    """Print and draw what the runs show; False where they show nothing."""
    output: Path = made[0].output.parent
    style = "json" if options.json else "text"
    folders = [str(session.output) for session in made if session.output.is_dir()]
    return scaling.main([*folders, "--output", str(output), "--format", style]) == 0
