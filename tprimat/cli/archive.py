"""Pack records and the report into one file for others, with what may leave this machine: no logs, secrets, hosts and folders.

tprimat archive output results.tar.gz
tprimat archive h100 mi300x both.tar.gz

Other machines read it as it is: ./compare.py --results-dir results.tar.gz
"""

import argparse
from itertools import chain
from pathlib import Path

from tprimat.cli.common import add_counting, read
from tprimat.core.errors import ConfigError

README = """Results of training runs, packed by TPrimat.

report.html                            opens in any browser, offline
./compare.py --results-dir THIS.tar.gz compares them, also with other results
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders or files with results")
    parser.add_argument("output", type=Path, metavar="OUT.tar.gz", help="where to write")
    add_counting(parser)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 where a file was damaged, which the report names."""
    from tprimat.records.archive import is_archive, write_archive
    from tprimat.records.discover import probes_in
    from tprimat.report.tables import plural
    from tprimat.runner.analysis import report_page
    from tprimat.runner.export import packed

    if not is_archive(options.output):
        raise ConfigError(f"{options.output} is not the name of an archive.", where="OUT.tar.gz", fix="results.tar.gz")
    results = read(options, options.results, to_share=True)
    probes, _ = probes_in(options.results)  # what is damaged is among the problems
    texts = [("README.txt", README), ("report.html", report_page(results))]
    write_archive(options.output, chain(texts, packed(results.measured, probes, options.results)))
    size = options.output.stat().st_size / 1e6
    print(f"{options.output}: {plural(len(results.measured), 'run')} and the report, {size:.1f} MB")
    return 1 if results.problems else 0
