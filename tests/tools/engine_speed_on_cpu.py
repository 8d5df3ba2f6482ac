"""Started in tests: benchmarks/engine_speed.py with a torchtitan that does run on a CPU, and has our tiny Llama."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import engine_speed  # noqa: E402

from tprimat.engines import torchtitan  # noqa: E402

if __name__ == "__main__":
    torchtitan.FLAVORS = {"llama-3.1-8b-tiny": "debugmodel"}
    torchtitan._unsupported_model = lambda plan, where: iter(())
    sys.exit(engine_speed.main())
