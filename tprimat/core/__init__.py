"""Facts with their sources (accelerators, model shapes, FLOP counts, published results), units, statistics and user errors."""
