"""List the models and accelerators that TPrimat knows."""

import argparse
import json
import sys
from dataclasses import asdict

from tprimat.core.accelerators import accelerators
from tprimat.core.errors import ConfigError
from tprimat.core.models import model_shape, models
from tprimat.core.published import rebase, results
from tprimat.records.store import as_document
from tprimat.report.models import count_rows, published_text, template, text_of
from tprimat.report.tables import screen_of


def run(options: argparse.Namespace) -> int:
    """Exit status: 0."""
    selected, screen = list(map(model_shape, options.models)) or list(models().values()), screen_of(sys.stdout)
    if options.yaml and len(options.models) != 1:
        raise ConfigError("--yaml prints one model.", where="--yaml", fix="python3 -m tprimat models llama-3.2-1b --yaml")
    if options.published:
        rows = [one for one in map(rebase, results()) if not options.models or one.workload.shape in selected]
        document: object = list(map(as_document, rows))
        text = published_text(rows, screen)
    else:
        shown = () if options.models else accelerators()
        counts, sheets = count_rows(selected), [{**asdict(one), "usable_bytes": one.usable_bytes} for one in shown]
        document, text = {"counts": counts, "accelerators": sheets}, text_of(counts, sheets, screen)
    print(template(selected[0]) if options.yaml else json.dumps(document, indent=2) if options.json else text)
    return 0
