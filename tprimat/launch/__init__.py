"""Starts a command, watches it, stops it, and says how it ended."""
