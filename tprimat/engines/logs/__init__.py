"""Dialects of training logs that are read and never started."""
