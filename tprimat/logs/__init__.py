"""Read the training logs of any framework: which format, which steps, which record."""
