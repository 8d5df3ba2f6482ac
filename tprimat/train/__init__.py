"""What runs inside torchrun. The only stage, with probe, that imports torch."""
