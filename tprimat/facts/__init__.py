"""What is true of the world, each entry with its source: accelerators, model shapes, counts of FLOP."""
