"""GPUs, nodes, and sampling of power and clocks."""
