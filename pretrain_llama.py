#!/usr/bin/env python3
"""Train Llama 3.1 8B: as a benchmark when started directly, as one rank of it when started by torchrun.

PARALLEL=balanced OUTPUT_DIR=./output python3 pretrain_llama.py --steps 3
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from tprimat.cli.start import pretrain

if __name__ == "__main__":
    sys.exit(pretrain("llama"))
