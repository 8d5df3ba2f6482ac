"""Pack records, plans, logs and the report into one file for others, with secrets and names of hosts and users masked.

tprimat archive output results.tar.gz
tprimat archive h100 mi300x both.tar.gz

Other machines read it as it is: ./compare.py --results-dir results.tar.gz
"""

import argparse
from dataclasses import replace
from pathlib import Path

from tprimat.cli.common import add_counting, report_problems, report_read, results_of
from tprimat.core.errors import ConfigError

README = """Results of training runs, packed by TPrimat.

report.html                            opens in any browser, offline
./compare.py --results-dir THIS.tar.gz compares them, also with other results

Secrets, addresses, paths and the names of hosts and users were redacted where they were recognised. Not all are: look through the
logs before making them public.
"""

OTHER_PACKERS = (".zip", ".tar", ".gz", ".7z", ".rar", ".bz2", ".xz", ".zst", ".tbz", ".txz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders or files with results")
    parser.add_argument("output", type=Path, metavar="OUT.tar.gz", help="where to write")
    add_counting(parser)


def _archive_name(path: Path) -> Path:
    """Return the name of an archive for one that ends otherwise, such as x.zip or x.tar."""
    stem = path.with_suffix("") if path.suffix.lower() in OTHER_PACKERS else path
    return stem.with_name(f"{stem.name.removesuffix('.tar')}.tar.gz")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 where a file was damaged, which the report names, or could not be packed."""
    from tprimat.records.archive import REPORT, is_archive, pack, spare_folder, with_texts
    from tprimat.records.redaction import redactor_of_this_machine
    from tprimat.runner.analysis import report_page

    if not is_archive(options.output):
        raise ConfigError(
            f"{options.output} is not the name of an archive.", where="OUT.tar.gz", fix=str(_archive_name(options.output))
        )
    with spare_folder() as folder:
        # The report is made from the packed files, so that it shows nothing that was redacted.
        packed = folder / "results.tar.gz"
        done = pack(options.results, packed, redactor_of_this_machine())
        report_problems(done.problems)
        results = results_of(options, [packed])
        problems = [one.with_texts(lambda text: text.replace(str(packed), str(options.output))) for one in results.problems]
        report_read(replace(results, problems=problems), options.results)
        page = report_page(results).replace(str(packed), options.output.name)
        with_texts(packed, options.output, {REPORT: page, "README.txt": README})
    print(f"{options.output}: {len(done.names)} files and the report, {options.output.stat().st_size / 1e6:.1f} MB")
    return 1 if results.problems or done.problems else 0
