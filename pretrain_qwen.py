#!/usr/bin/env python3
"""Train Qwen 2.5 7B: as a benchmark when started directly, as one rank of it when started by torchrun.

PARALLEL=balanced OUTPUT_DIR=./output python3 pretrain_qwen.py --steps 3
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from tprimat.cli.start import pretrain

if __name__ == "__main__":
    sys.exit(pretrain("qwen"))
