"""Facts, each with its source: accelerators, model shapes, FLOP counts, published results."""
