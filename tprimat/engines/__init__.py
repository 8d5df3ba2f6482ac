"""The frameworks that can be started, a module each: from a plan to a command, and from a log line to fields."""

AUTO = "auto"
ENGINE_NAMES = ("megatron", "bridge", "megatron-lm", "nemo", "primus", "torchtitan")
FALLBACK = ENGINE_NAMES[0]
