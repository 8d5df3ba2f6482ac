"""The GPUs and nodes of this machine, and samples of what they do."""
