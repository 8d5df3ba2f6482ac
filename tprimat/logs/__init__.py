"""Read the training log of another framework: `read_log` in logs/read.py returns its run."""
