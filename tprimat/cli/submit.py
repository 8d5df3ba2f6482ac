"""Hand runs to a scheduler and follow the job: the flags of `tprimat run`, with --launcher slurm if none is given."""

import argparse

from tprimat.cli import run as run_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run."""
    run_command.add_arguments(parser)
    parser.set_defaults(launcher="slurm")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 when the job completed, 1 when it did not."""
    return run_command.run(options)
