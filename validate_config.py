#!/usr/bin/env python3
"""Check every model x platform x strategy of config.yaml; exit 1 if anything is not valid.

./validate_config.py
./validate_config.py --config config.yaml --gpus 16
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from tprimat.cli.start import script

if __name__ == "__main__":
    sys.exit(script("validate", "validate_config.py"))
