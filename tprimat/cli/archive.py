"""Pack records, plans, logs and the report into one file for others, without secrets and names of hosts and users.

python -m tprimat.cli.archive output results.tar.gz
python -m tprimat.cli.archive h100 mi300x both.tar.gz

Other machines read it as it is: ./compare.py --results-dir results.tar.gz
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli.console import outlasting
from tprimat.errors import ConfigError, UserError

README = """Results of training runs, packed by TPrimat.

report.html                            opens in any browser, offline
./compare.py --results-dir THIS.tar.gz compares them, also with other results

Secrets and the names of hosts, users and home directories were redacted where they were recognised. Not all are: look through the
logs before making them public.
"""


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from tprimat.cli.report import counting

    parser = argparse.ArgumentParser(
        prog="python -m tprimat.cli.archive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders or files with results")
    parser.add_argument("output", type=Path, metavar="OUT.tar.gz", help="where to write")
    counting(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Return the exit status: 0, or 1 where a damaged file was packed; the report names it."""
    import tempfile

    from tprimat.cli.report import page
    from tprimat.records.archive import REPORT, is_archive, pack, with_texts
    from tprimat.records.redaction import redactor_of_this_machine

    if not is_archive(options.output):
        raise ConfigError(f"{options.output} is not the name of an archive.", where="OUT.tar.gz", fix=f"{options.output}.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        # The report is made from the packed files, so that it shows nothing that was redacted.
        packed = Path(folder, "results.tar.gz")
        names = pack(options.results, packed, redactor_of_this_machine())
        options.results = [packed]
        text, problems = page(options)
        with_texts(packed, options.output, {REPORT: text.replace(str(packed), options.output.name), "README.txt": README})
    print(f"{options.output}: {len(names)} files and the report, {options.output.stat().st_size / 1e6:.1f} MB")
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for a damaged file, 2 for a mistake in the command line."""
    options = argument_parser().parse_args(argv)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
