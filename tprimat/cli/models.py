"""List models and accelerators, and published training speeds on a common basis.

python -m tprimat.cli.models
python -m tprimat.cli.models llama-3.1-8b qwen-2.5-7b --sequence 8192
python -m tprimat.cli.models --table results
python -m tprimat.cli.models mixtral-8x7b --json
"""

import argparse
import json
import sys
from collections.abc import Sequence

from tprimat.cli.console import outlasting
from tprimat.errors import UserError
from tprimat.facts.models import models
from tprimat.report.models import TABLES, select_models, text_of


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tprimat.cli.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(models())} (all)")
    parser.add_argument(
        "--sequence",
        type=int,
        metavar="N",
        help="tokens to count FLOP at; models with a shorter context are left out (2048, or the context if shorter)",
    )
    parser.add_argument("--table", choices=TABLES, action="append", help="only this table; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, in SI units and with sources")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake in the command line or in tprimat/data."""
    try:
        options = argument_parser().parse_args(argv)
        selected = select_models(options.models, options.sequence)
        rows = {name: TABLES[name].rows(selected) for name in options.table or TABLES}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(rows, indent=2) if options.json else text_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(outlasting(main))
