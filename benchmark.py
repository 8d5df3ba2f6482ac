#!/usr/bin/env python3
"""Train Megatron models under a parallelism strategy and measure every step.

./benchmark.py --parallel minimal_communication
./benchmark.py --model llama --parallel balanced --output-dir ./results --runs 3
./benchmark.py --model qwen --dry-run
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from tprimat.cli.start import script

if __name__ == "__main__":
    sys.exit(script("run", "benchmark.py"))
