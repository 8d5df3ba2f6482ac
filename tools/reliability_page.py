#!/usr/bin/env python3
"""Write the figures of benchmarks/results/reliability.md from faults.json and large.json; with --check, only compare.

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

import large_records  # noqa: E402
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


def large_figures(record: dict[str, Any]) -> str:
    """Return the table of what long runs cost."""

    def seconds(part: str) -> str:
        return f"{record[part]['seconds']:.1f} s, {record[part]['cpu_seconds']:.1f} s of it on a processor"

    steps = f"{record['steps']:,}"
    memory = {part: f"{record[part]['peak_bytes'] / 1e6:.0f} MB" for part in ("launcher", "compare")}
    rows = [
        (
            f"memory of the launcher of a run with {steps} steps",
            memory["launcher"],
            f"{large_records.LAUNCHER_BYTES / 1e6:.0f} MB",
        ),
        (f"`./compare.py` on that run, in {memory['compare']}", seconds("compare"), f"{large_records.COMPARE_SECONDS:.0f} s"),
    ]
    return table(("what", "cost", "limit"), rows) + (
        f"\n\nMeasured on {record['cores']} cores of an {record['cpu']}, which others used as well (load average "
        f"{record['load_before']} at the start), with Python {record['python']} and version `{record['version']}`.\n"
    )


def main() -> int:
    """Exit status: 1 where --check finds a difference."""
    options = page_parser(__doc__).parse_args()
    blocks = figures(json.loads(RECORD.read_text(encoding="utf8")))
    text = replace_blocks(PAGE.read_text(encoding="utf8"), "faults", lambda name: blocks[name])
    large = large_figures(json.loads(large_records.RECORD.read_text(encoding="utf8")))
    text = replace_blocks(text, "large", lambda _: large)
    return update_page(PAGE, text, check=options.check, command="python3 tools/reliability_page.py")


if __name__ == "__main__":
    sys.exit(main())
