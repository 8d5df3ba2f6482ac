#!/usr/bin/env python3
"""Write the figures of benchmarks/results/reliability.md from faults.json; with --check, only compare.

python3 tools/reliability_page.py
python3 tools/reliability_page.py --check
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")]

from faults import FAULTS, RECORD  # noqa: E402
from page import page_parser, replace_blocks, update_page  # noqa: E402

from tprimat.report.tables import table  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "reliability.md"


def figures(record: dict[str, Any]) -> dict[str, str]:
    """Return the block of each name."""
    sweeps = record["sweeps"]
    met: Counter[str] = Counter(name for sweep in sweeps for name in sweep["faults"])
    ended: Counter[str] = Counter()
    for sweep in sweeps:
        ended.update(sweep["outcomes"])
    wrong = [text for sweep in sweeps for text in sweep["wrong"]] + record["left_in_the_temporary_folder"]
    left_out = "".join(f" Left out: {FAULTS[name][0]} ({why})." for name, why in sorted(record["left_out"].items()))
    result = (
        f"{record['cells']} cells in {len(sweeps)} sweeps met {met.total()} faults (seed {record['seed']}, version "
        f"`{record['version']}`) and took {ended.total()} runs. Checks that failed: {len(wrong)}.{left_out}\n"
    )
    rows = [(text, str(met[name])) for name, (text, _) in FAULTS.items()]
    outcomes = [(name.replace("_", " "), str(count)) for name, count in sorted(ended.items())]
    return {
        "result": result,
        "faults": table(("fault", "times"), rows) + "\n",
        "outcomes": table(("how runs ended", "runs"), outcomes) + "\n",
    }


def main() -> int:
    """Exit status: 1 where --check finds a difference."""
    options = page_parser(__doc__).parse_args()
    blocks = figures(json.loads(RECORD.read_text(encoding="utf8")))
    text = replace_blocks(PAGE.read_text(encoding="utf8"), "faults", lambda name: blocks[name])
    return update_page(PAGE, text, check=options.check, command="python3 tools/reliability_page.py")


if __name__ == "__main__":
    sys.exit(main())
