#!/usr/bin/env python3
"""Find the fastest configuration of each machine and model; writes peak_throughput_summary.txt.

./analyze_peak_throughput.py
./analyze_peak_throughput.py --show-all --results-dir ./output
./analyze_peak_throughput.py --results-dir ./h100 ./mi300x --nodes 1,2,4,8 --scaling-efficiency 0.9
./analyze_peak_throughput.py --seed-conventions --json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from tprimat.cli.start import script

if __name__ == "__main__":
    sys.exit(script("peak", "analyze_peak_throughput.py"))
