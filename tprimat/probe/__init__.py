"""One benchmark an operation: what this machine reaches on the bare operations."""
