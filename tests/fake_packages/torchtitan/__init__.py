"""A fake torchtitan: it prints what torchtitan prints, and trains nothing."""
