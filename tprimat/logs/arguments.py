"""Arguments of Megatron-LM as evidence, however a framework prints them; which ones a record keeps."""

from collections.abc import Callable, Mapping
from typing import Any

from tprimat.core.rows import DATA, document
from tprimat.logs.fields import LineFields, capacity, truth, whole

_NAMES = document(DATA / "log_arguments.yaml")
WHOLE_ARGUMENTS: Mapping[str, str] = _NAMES["evidence"]
"""Argument -> field of records.schema.Evidence."""
OPTIONS_OF: Mapping[str, list[str]] = _NAMES["options"]
"""Framework -> its arguments that change the speed of the same work."""
OTHER_WORK: Mapping[str, str] = _NAMES["other_work"]
"""Argument that asks for a step whose FLOP are not counted here -> what it says of the run."""
MAXTEXT: Mapping[str, Mapping[str, Any]] = _NAMES["maxtext"]
"""Kind of setting -> MaxText's settings, and what they mean."""
OPTIONS = frozenset(name for names in OPTIONS_OF.values() for name in names)
KEPT = frozenset([*_NAMES["model"], *OTHER_WORK, *_NAMES["arithmetic"], *OPTIONS_OF["megatron"], *OPTIONS_OF["deepspeed"]])
KNOWN_LATER = {"vocab_size", "padded_vocab_size"}
"""None in the dump where the tokenizer tells them after it."""
NARROW = {"hybrid", "e4m3", "true"}
"""Values of fp8 and its two switches of 2023, of which one is False."""

FACTS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "bf16": lambda value: {"matmul_dtype": "bf16"} if truth(value) else {},
    "fp16": lambda value: {"matmul_dtype": "fp16"} if truth(value) else {},
    "fp8": lambda value: {"fp8": value.lower() in NARROW},
    "fp8_hybrid": lambda value: {"fp8": True} if truth(value) else {},
    "fp8_e4m3": lambda value: {"fp8": True} if truth(value) else {},
    "fp4": lambda value: {"matmul_dtype": "fp4"} if value.lower() in {"e2m1", "nvfp4", "mxfp4"} else {},
    "params_dtype": lambda value: {"parameter_dtype": value.removeprefix("torch.")},
    "transformer_impl": lambda value: {"transformer_engine": value == "transformer_engine"},
    "optimizer": lambda value: {"optimizer": value},
    "recompute_granularity": lambda value: {"recompute": value.lower()} if value.lower() in {"none", "selective", "full"} else {},
    "sequence_parallel": lambda value: {} if (switch := truth(value)) is None else {"sequence_parallel": switch},
    "moe_router_force_load_balancing": lambda value: {"routing": "balanced" if truth(value) else "natural"},
    "moe_expert_capacity_factor": lambda value: {"expert_capacity": capacity(value)},
    "mock_data": lambda value: {"data": "mock"} if truth(value) else {},
}
"""Argument -> what it says of a run. `fp8` is a switch over `matmul_dtype`, with which read.evidence_of joins it."""


def argument(name: str, value: str) -> LineFields | None:
    """Return one of Megatron's arguments; None for those that records do not keep."""
    value = value.strip()
    if name == "train_iters":
        return LineFields(total_steps=whole(value))
    evidence = FACTS[name](value) if name in FACTS else {}
    if name in WHOLE_ARGUMENTS and (size := whole(value)) is not None:
        evidence = {WHOLE_ARGUMENTS[name]: size}
    if name in KEPT and not (name in KNOWN_LATER and whole(value) is None):
        return LineFields(arguments={name: value}, evidence=evidence)
    return LineFields(evidence=evidence) if evidence else None
