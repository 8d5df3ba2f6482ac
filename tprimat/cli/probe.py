"""Measure what the bare operations reach on this machine.

python -m tprimat.cli.probe gemm,memory
python -m tprimat.cli.probe all --output output --time-budget 240
python -m tprimat.cli.probe gemm --dtype bf16,fp8 --json
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.errors import ConfigError, UserError

if TYPE_CHECKING:
    from tprimat.record.schema import ProbeRecord

SINGLE = ("gemm", "memory")
KINDS = SINGLE
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
    kinds = chosen_kinds(options.kinds)
    try:
        from tprimat.probe import case, catalogue, gemm
    except ImportError as error:
        raise ConfigError(
            f"Probes need PyTorch: {error}.", fix="pip install torch, in the build that your accelerator needs"
        ) from error
    dtypes = tuple(options.dtype.split(",")) if options.dtype else gemm.DTYPES
    choice = catalogue.Choice(dtypes=catalogue.check_dtypes(dtypes))
    bench = case.open_bench(small=options.small)
    notebook = case.open_notebook(options.output / FILE_NAME, resume=options.resume, seconds=options.time_budget, tell=tell)
    for kind in kinds:
        yield from catalogue.PROBES[kind](choice, bench, notebook)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake in the command line."""
    options = parser().parse_args(argv)
    try:
        records = []
        for record in measure(options):
            records.append(record)
            if options.json:
                from tprimat.record.files import to_json

                print(to_json(record), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tell(f"{len(records)} measurements; all samples are in {options.output / FILE_NAME}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
