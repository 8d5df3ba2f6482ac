"""The frameworks that can be started, by name: from a plan to a command, and from a log line to fields."""

AUTO = "auto"
MODULES = {
    "megatron": "tprimat.engines.embedded",
    "bridge": "tprimat.engines.bridge",
    "megatron-lm": "tprimat.engines.megatron_lm",
    "nemo": "tprimat.engines.nemo",
    "primus": "tprimat.engines.primus",
    "torchtitan": "tprimat.engines.torchtitan",
}
"""Engine name -> the module with its ENGINE."""
ENGINE_NAMES = tuple(MODULES)
FALLBACK = ENGINE_NAMES[0]
"""The engine that runs everywhere."""
