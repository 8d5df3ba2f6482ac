"""Started by engine_speed_on_cpu.py: ./benchmark.py, whose torchtitan takes a CPU and our tiny Llama."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tprimat.cli.start import script
from tprimat.engines import torchtitan

if __name__ == "__main__":
    torchtitan.FLAVORS = {"llama-3.1-8b-tiny": "debugmodel"}
    torchtitan.TorchtitanEngine.lacks -= {"cpu", "sizes"}
    torchtitan._unsupported_model = lambda plan, where: iter(())
    sys.exit(script("run", "benchmark.py"))
