"""Argument parsing, one file per command."""
