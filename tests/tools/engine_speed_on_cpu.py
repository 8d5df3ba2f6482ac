"""Started in tests: benchmarks/engine_speed.py, whose torchtitan does run on a CPU, and has our tiny Llama."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

if __name__ == "__main__":
    import engine_speed
    import speed_programs

    speed_programs.BENCHMARK = Path(__file__).with_name("benchmark_on_cpu.py")
    sys.exit(engine_speed.main())
