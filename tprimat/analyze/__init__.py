"""Pure functions on records."""
