"""Stands in for torchtitan where benchmarks/engine_speed.py is tested: it says what torchtitan says, and trains nothing."""
