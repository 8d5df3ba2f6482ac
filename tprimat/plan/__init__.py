"""What a run will do, and what is expected of it."""
