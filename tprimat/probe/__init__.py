"""Benchmarks of single operations: what this machine reaches outside a training run."""
