"""What the user asks for: config.yaml, flags and environment, typed and traceable to their line."""
