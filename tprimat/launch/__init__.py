"""Start a command, watch it, stop it, and say how it ended."""
