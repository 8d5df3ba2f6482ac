"""NeMo 2's recipes under a plan."""
