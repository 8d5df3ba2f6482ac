#!/usr/bin/env python3
"""Write docs/h200.md from the records in results/h200; with --check, only say whether it is up to date.

python3 tools/suite_page.py
python3 tools/suite_page.py --check
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tprimat.analyze.probes import newest_of_each, settings_of  # noqa: E402
from tprimat.cli import finetune  # noqa: E402
from tprimat.records.discover import PROBES_FILE  # noqa: E402
from tprimat.records.store import read_probes  # noqa: E402
from tprimat.report.suite import page_of  # noqa: E402

RESULTS = ROOT / "results" / "h200"
PAGE = ROOT / "docs" / "h200.md"
PREFACE = """Made by `python3 tools/suite_page.py` from the records in `results/h200`: the probes of each folder there, and the
training runs of Qwen3 8B under `results/h200/qwen3-8b`. `python -m tprimat.cli.suite` measures the same and writes the same page
about any other accelerator."""


def text() -> str:
    """The page. Each folder's newest setting counts; where all folders share one, the newest record of each operation."""
    chosen = [probe for file in sorted(RESULTS.glob(f"*/{PROBES_FILE}")) for probe in newest_of_each(read_probes(file))]
    if len(settings_of(chosen)) == 1:
        chosen = newest_of_each(chosen)
    return page_of(chosen, [finetune.section(RESULTS)], PREFACE)


def main() -> int:
    """Returns: 1 if --check finds a page that differs from its records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf8") == text() else 1
    PAGE.write_text(text(), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
