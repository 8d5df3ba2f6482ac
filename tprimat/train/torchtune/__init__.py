"""What torchtune reads, made here so that nothing has to be downloaded: instructions, a tokenizer, random weights."""

COMPLETE = "random-weights.json"
"""Written last into a checkpoint of random weights: says that they mean nothing, and that all are there."""
