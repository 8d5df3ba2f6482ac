"""Start a command, follow it, stop it, and say how it ended."""
