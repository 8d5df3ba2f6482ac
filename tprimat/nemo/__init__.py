"""NeMo 2's recipes, trained under a plan."""
