#!/usr/bin/env python3
"""Write benchmarks/results/h200.md from the records in benchmarks/records/h200; with --check, only compare.

python3 tools/h200_page.py
python3 tools/h200_page.py --check
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from page import page_parser, update_page  # noqa: E402

from benchmarks.finetune_qwen3.section import section  # noqa: E402
from tprimat.analyze.probes import newest_of_each, settings_of  # noqa: E402
from tprimat.records.discover import PROBES_FILE  # noqa: E402
from tprimat.records.store import read_probes  # noqa: E402
from tprimat.report.probes import page_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "records" / "h200"
PAGE = ROOT / "benchmarks" / "results" / "h200.md"
PREFACE = """`python3 tools/h200_page.py` writes this page from the probes and the runs of Qwen3 8B in `benchmarks/records/h200`.
On any other accelerator, `tprimat probe all` and `tprimat probe pieces,overlap` write the same page, and
`python3 -m benchmarks.finetune_qwen3` its last section."""


def text() -> str:
    """Write the page from each folder's newest setting; if all share one, from the newest record of each operation."""
    chosen = [probe for file in sorted(RESULTS.glob(f"*/{PROBES_FILE}")) for probe in newest_of_each(read_probes(file))]
    if len(settings_of(chosen)) == 1:
        chosen = newest_of_each(chosen)
    return page_of(chosen, PREFACE, section(RESULTS))


def main() -> int:
    """Exit status: 0, or 1 where --check finds a difference."""
    options = page_parser(__doc__).parse_args()
    return update_page(PAGE, text(), check=options.check, command="python3 tools/h200_page.py")


if __name__ == "__main__":
    sys.exit(main())
