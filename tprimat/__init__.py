"""TPrimat: which parallelism strategy trains an LLM fastest on this machine, and how sure that is."""

__version__ = "0.1.0"
