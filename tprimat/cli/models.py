"""List the models and accelerators that TPrimat knows."""

import argparse
import json
import sys

from tprimat.core.errors import ConfigError
from tprimat.core.published import rebase, results
from tprimat.records.store import as_document
from tprimat.report.models import accelerator_rows, count_rows, published_text, select_models, template, text_of
from tprimat.report.tables import screen_of


def run(options: argparse.Namespace) -> int:
    """Exit status: 0."""
    selected = select_models(options.models)
    if options.published:
        rows = [one for one in map(rebase, results()) if not options.models or one.workload.shape in selected]
        print(json.dumps(list(map(as_document, rows)), indent=2) if options.json else published_text(rows, screen_of(sys.stdout)))
        return 0
    if options.yaml:
        if len(options.models) != 1:
            raise ConfigError("--yaml prints one model.", where="--yaml", fix="python3 -m tprimat models llama-3.2-1b --yaml")
        print(template(selected[0]))
        return 0
    tables = {"counts": count_rows(selected), "accelerators": [] if options.models else accelerator_rows()}
    print(
        json.dumps(tables, indent=2) if options.json else text_of(tables["counts"], tables["accelerators"], screen_of(sys.stdout))
    )
    return 0
