#!/usr/bin/env python3
"""Draw peak throughput in four panels: peak_throughput_analysis.png.

./visualize_peak_throughput.py
./visualize_peak_throughput.py --results-dir ./h100 ./mi300x --output h100-mi300x.svg
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from tprimat.cli.start import script

if __name__ == "__main__":
    sys.argv.insert(1, "--picture")
    sys.exit(script("peak", "visualize_peak_throughput.py"))
