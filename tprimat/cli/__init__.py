"""Argument parsing and wiring, one file a door."""
