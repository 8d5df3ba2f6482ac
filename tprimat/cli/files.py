"""The commands for files of others: logs in, records out."""

import argparse
from itertools import chain
from pathlib import Path

from tprimat.cli.common import read, results_dirs
from tprimat.core.errors import ConfigError

README = """Results of training runs, packed by TPrimat.

report.html                            opens in any browser, offline
./compare.py --results-dir THIS.tar.gz compares them, also with other results
"""


def extract(options: argparse.Namespace) -> int:
    """Exit status: 0, 1 where the log shows a failed run."""
    from tprimat.config.load import plain_name
    from tprimat.logs.contents import Claims
    from tprimat.runner.logs import extract_log

    claims = Claims(
        model=plain_name(options.model_name.rpartition("/")[2], "--model-name"),  # meta-llama/Llama-3.1-8B, too
        gpus=options.num_gpus,
        nodes=options.num_nodes,
        global_batch_sequences=options.global_batch_size,
        sequence_tokens=options.sequence_length,
        accelerator=options.gpu,
    )
    return extract_log(options.log_file, claims, output=options.output)


def export(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 where a file of results was damaged, after the others were written."""
    from tprimat.records.store import write_atomically
    from tprimat.report.export import comma_separated, rows_of
    from tprimat.report.tables import plural
    from tprimat.runner.analysis import places_of, to_wandb

    folders = results_dirs(options) or [Path("output")]
    results = read(options, folders, to_share=True)
    places = places_of(results.measured, folders)
    rows = [row | {"path": place} for row, place in zip(rows_of(results.measured), places, strict=True)]
    written = len(rows)
    if options.to == "wandb-offline":
        written = to_wandb(results.measured, rows, options.path)
    else:
        write_atomically(options.path, comma_separated(rows))
    print(f"{options.path}: {plural(written, 'run')}" + (f" of {len(rows)}" if written < len(rows) else ""))
    return 1 if results.problems else 0


def archive(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 where a file was damaged, which the report names."""
    from tprimat.records.discover import is_archive, probes_in, write_archive
    from tprimat.report.tables import plural
    from tprimat.runner.analysis import packed, report_page

    if not is_archive(options.output):
        raise ConfigError(f"{options.output} is not the name of an archive.", where="OUT.tar.gz", fix="results.tar.gz")
    results = read(options, options.results, to_share=True)
    probes, _ = probes_in(options.results)  # what is damaged is among the problems
    texts = [("README.txt", README), ("report.html", report_page(results))]
    write_archive(options.output, chain(texts, packed(results.measured, probes, options.results)))
    size = options.output.stat().st_size / 1e6
    print(f"{options.output}: {plural(len(results.measured), 'run')} and the report, {size:.1f} MB")
    return 1 if results.problems else 0
