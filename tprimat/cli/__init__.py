"""Argument parsing, one file a command."""
