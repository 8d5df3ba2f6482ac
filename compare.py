#!/usr/bin/env python3
"""Compare training runs: six panels, a table and a verdict.

./compare.py --results-dir ./output
./compare.py --results-dir ./h100 ./mi300x --output h100-mi300x.svg
./compare.py --results-dir ./before ./after --baseline before --fail-if-slower 3%
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from tprimat.cli.start import script

if __name__ == "__main__":
    sys.exit(script("compare", "compare.py"))
