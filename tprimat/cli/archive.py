"""Pack results into one file for others: records, plans, logs and the report, without secrets and names of hosts and users.

python -m tprimat.cli.archive output results.tar.gz
python -m tprimat.cli.archive h100 mi300x both.tar.gz

Another machine reads it as it is: ./compare.py --results-dir results.tar.gz
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli.console import outlasting
from tprimat.errors import ConfigError, UserError

README = """Results of training runs, packed by TPrimat.

report.html                            opens in any browser, offline
./compare.py --results-dir THIS.tar.gz compares them, alone or beside other results

Secrets and the names of hosts, users and home directories were masked where they were recognised. What looks like none of them is
not recognised: look through the logs before making them public.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from tprimat.cli.report import counting

    made = argparse.ArgumentParser(
        prog="python -m tprimat.cli.archive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders or files with results")
    made.add_argument("output", type=Path, metavar="OUT.tar.gz", help="where to write")
    counting(made)
    return made


def this_machine() -> tuple[set[str], set[str]]:
    """Names of this host and of this user."""
    import getpass
    import socket

    from tprimat.records.redaction import NO_USER, distinctive

    name = socket.gethostname()
    try:
        user = {getpass.getuser()}
    except (OSError, KeyError):  # an account without a name
        user = set()
    return {host for host in (name, name.split(".")[0], socket.getfqdn()) if distinctive(host)}, user - NO_USER


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a file was bad: it is packed as it is, and the report names it."""
    import tempfile

    from tprimat.cli.report import page
    from tprimat.records.archive import REPORT, is_archive, pack, with_texts
    from tprimat.records.redaction import Masker

    if not is_archive(options.output):
        raise ConfigError(f"{options.output} is no archive's name.", where="OUT.tar.gz", fix=f"{options.output}.tar.gz")
    hosts, users = this_machine()
    masker = Masker(hosts=hosts, users=users)
    with tempfile.TemporaryDirectory() as folder:
        # The report is made from what is packed, so that it tells nothing that the records no longer tell.
        packed = Path(folder, "results.tar.gz")
        names = pack(options.results, packed, masker)
        options.results = [packed]
        text, problems = page(options)
        with_texts(packed, options.output, {REPORT: text.replace(str(packed), options.output.name), "README.txt": README})
    print(f"{options.output}: {len(names)} files and the report, {options.output.stat().st_size / 1e6:.1f} MB")
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when a file was bad, 2 for a mistake in the command line."""
    options = parser().parse_args(argv)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
