"""List the models and accelerators that TPrimat knows, and what others published about them.

tprimat models                         parameters of models, and data sheets of accelerators
tprimat models llama-3.1-8b qwen-2.5-7b --sequence 8192     all that is known of these
tprimat models --table results         published training speeds on a common basis
tprimat models mixtral-8x7b --json
"""

import argparse
import json
import sys

from tprimat.core.models import models
from tprimat.report.models import BRIEF, TABLES, select_models, text_of
from tprimat.report.screen import screen_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(models())} (all)")
    parser.add_argument(
        "--sequence",
        type=int,
        metavar="N",
        help="tokens to count FLOP at; models with a shorter context are left out (2048, or the context if shorter)",
    )
    parser.add_argument(
        "--table",
        choices=TABLES,
        action="append",
        help="only this table; may be repeated (counts and accelerators; of some models, and with --json: all)",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, in SI units and with sources")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0."""
    selected = select_models(options.models, options.sequence)
    brief = selected.all_models and not options.json and not options.table
    rows = {name: TABLES[name].rows(selected) for name in options.table or (BRIEF if brief else TABLES)}
    print(json.dumps(rows, indent=2) if options.json else text_of(rows, screen_of(sys.stdout)))
    if brief:
        print(f"\nPublished figures: --table {' or '.join(name for name in TABLES if name not in BRIEF)}")
    return 0
