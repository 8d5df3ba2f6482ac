"""Read config.yaml, flags and environment into types that remember the line of every key."""
