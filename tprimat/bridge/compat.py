"""The private name of Megatron-Bridge that its trainer replaces."""

from megatron.bridge.training import initialize

from tprimat.train.compat import require

require("megatron-bridge", initialize, "compile_helpers")


def skip_dataset_helpers() -> None:
    """Compile no data set helpers of Megatron-Core: its wheel lacks the Makefile, and our sequences need none."""
    initialize.compile_helpers = lambda: None
