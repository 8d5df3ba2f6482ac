"""What a configuration is: its traits in words, and in which of them compared runs must agree."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from tprimat.core.accelerators import find_accelerator
from tprimat.core.models import family_of, models
from tprimat.core.rows import DATA, document
from tprimat.core.workload import Workload
from tprimat.records.evidence import grade_of
from tprimat.records.legacy import MODELS as USUAL_SHAPES
from tprimat.records.schema import RunRecord


def tokens_per_step(run: RunRecord) -> int | None:
    """Return the tokens of a step: observed where there is evidence, else batch times sequence length."""
    if run.evidence is not None and run.evidence.tokens_per_step is not None:
        return run.evidence.tokens_per_step
    return run.ran.tokens_per_step


def _seen(run: RunRecord) -> Workload:
    """Return what was seen to run; nothing of a record without evidence."""
    return Workload() if run.evidence is None else run.evidence.workload


def sequence_words(run: RunRecord) -> str | None:
    """Return the tokens of a sequence, and whether documents are packed or padded to fill it: '8,192 packed'."""
    filled, tokens = _seen(run).documents, run.ran.sequence_tokens
    return None if tokens is None else f"{tokens:,}" + (f" {filled}" if filled else "")


def model_name(run: RunRecord) -> str:
    """Return 'llama', or 'llama tiny' for a size other than the full one.

    A model of another family than its key has the name of its shape: olmoe-1b-7b under the key qwen3_moe.
    """
    if run.ran.shape is not None:
        asked, ran = family_of(run.model), family_of(run.ran.shape.name)
        if asked and ran and asked != ran:
            return run.ran.shape.name
    return run.model if run.size == "full" else f"{run.model} {run.size}"


def model_and_shape(run: RunRecord) -> str:
    """Return the model's name, with its shape unless it is the usual one: 'llama (llama-3.1-8b-20-layers)'."""
    name = model_name(run)
    if run.size != "full" or run.ran.shape is None or run.ran.shape.name == name:
        return name
    usual = USUAL_SHAPES.get(run.model)
    whole = run.ran.shape.name == usual if usual else run.ran.shape.name.lower() in models()
    return name if whole else f"{name} ({run.ran.shape.name})"


def accelerator_name(run: RunRecord) -> str:
    """Return our short name where the accelerator is known, else the name that the machine reported."""
    known = find_accelerator(run.machine.accelerator)
    return known.name if known else run.machine.accelerator or "unknown accelerator"


def layout(run: RunRecord) -> str:
    """Return the layout, such as TP4 PP2 DP1: without what is not recorded, and with VPP, CP and EP only where they are not 1."""
    return run.ran.layout_words()


def ranks(run: RunRecord) -> str | None:
    """Return '8 GPUs', '1 GPU', or '8 processes' on a CPU; None where the number is not recorded."""
    count = run.machine.gpus
    nouns = ("process", "processes") if run.machine.platform == "cpu" else ("GPU", "GPUs")
    return f"{count:,} {nouns[count != 1]}" if count else None


def on_nodes(run: RunRecord) -> str:
    """Return ' on 2 nodes', or nothing for one node, or where the number is not recorded."""
    count = run.machine.nodes
    return f" on {count} nodes" if count and count > 1 else ""


def machine_name(run: RunRecord) -> str:
    """Return '8 x H100 SXM', or '8 processes (AMD EPYC)', since processes share one CPU."""
    name = accelerator_name(run)
    return f"{ranks(run)} ({name})" if run.machine.platform == "cpu" else f"{run.machine.gpus or 'unknown'} x {name}"


EXPERTS = "experts"
"""Part of a model, which a dense one lacks."""


def dtype_that_ran(run: RunRecord) -> str | None:
    """Return what the matrix units ran, such as bf16, and where in the model fp8 or fp4 differs from the usual recipes."""
    if run.ran.matmul_dtype not in {"fp8", "fp4"} or run.evidence is None:
        return run.ran.matmul_dtype
    seen = _seen(run)
    also = (("output layer", seen.output_layer_dtype), ("attention", seen.attention_dtype))
    besides, layers = " and ".join(part for part, dtype in also if dtype == "fp8"), run.ran.layers_in_bf16 or 0
    mixture = run.ran.shape is None or run.ran.shape.experts is not None
    parts = [part for part in seen.wider_parts or () if mixture or part != EXPERTS]
    wider = [f"in {layers} layer{'s' * (layers > 1)}"] * (layers > 0) + [f"in {part}" for part in parts]
    return run.ran.matmul_dtype + (f" with {besides}" if besides else "") + (f" except {' and '.join(wider)}" if wider else "")


def engine_words(run: RunRecord) -> str:
    """Return the engine, and Transformer Engine where the running model was seen to have its layers."""
    seen = run.evidence is not None and run.evidence.transformer_engine
    return f"{run.engine} with Transformer Engine" if seen else run.engine


def processors(run: RunRecord) -> str | None:
    """Return the processors of a run's nodes, each kind once: 'AMD EPYC 9654 with 64 cores'; None where a node does not say."""
    if not run.nodes or any(node.processor is None for node in run.nodes):
        return None
    kinds = dict.fromkeys((node.processor, node.cores) for node in run.nodes)
    return " and ".join(f"{name} with {cores} core{'s' * (cores != 1)}" if cores else str(name) for name, cores in kinds)


# The table of traits.

Effect = Literal["refuse", "warn", "list"]
Value = Callable[[RunRecord], object]


@dataclass(frozen=True, slots=True)
class Trait:
    """Something in which runs of unlike configurations differ. docs/comparing.md says what a difference does."""

    name: str
    value: Value
    """None where the record does not say, empty where the machine or model has no such thing."""
    effect: Effect
    """Of a difference on a comparison: it is refused, warned of, or listed."""
    words: str = "{}"
    """A value in words."""
    unknown: Effect | None = None
    """Effect where a side does not record it; None: the same as of a difference."""

    def label(self, run: RunRecord) -> str:
        """Return the value in words."""
        value = self.value(run)
        if value in {None, ""}:
            return "" if value == "" else f"{self.name} unknown"
        return self.words.format(value)


def _shape(run: RunRecord) -> str | None:
    fields = {name: getattr(run.ran.shape, name) for name in TABLE["shape"]} if run.ran.shape is not None else {}
    return ", ".join(f"{name}={value}" for name, value in fields.items() if value) or None


def _optimizer_states(run: RunRecord) -> str | None:
    """Return the dtype of masters and moments, and whose they are unless Adam's: another optimizer computes something else."""
    value, optimizer = run.ran.optimizer_states, run.ran.optimizer
    other = optimizer if optimizer and "adam" not in optimizer.lower() else None
    return f"{value or 'unknown dtypes'} ({other})" if other else value


IN_THE_DTYPE = ("fp8_output_layer", "first_last_layers_bf16")
"""Options that the dtype names: told again as options, they would be a second difference, and one from records before them."""
LATER_SWITCHES = ("cuda_graphs", "fully_shard")
"""Switches of the embedded engine that older records lack: they ran as with the switch off."""
DEFAULT_OPTIONS = "default options"


def _options(run: RunRecord) -> str | None:
    """Return the options of an engine; None where a log prints none, which does not make them the default ones."""
    log = run.evidence is not None and run.evidence.source == "log"
    named = [(name, value) for name, value in sorted(run.engine_options.items()) if name not in IN_THE_DTYPE]
    words = ", ".join(f"{name}={value}" for name, value in named if log or value is not False or name not in LATER_SWITCHES)
    return words or (None if log else DEFAULT_OPTIONS)


def _listed(items: Iterable[tuple[str, str]], between: str) -> str:
    return ", ".join(f"{name}{between}{value}" for name, value in items)


COMPUTED: Mapping[str, Value] = {
    "model": model_name,
    "accelerator": accelerator_name,
    "gpus": ranks,
    "nodes": lambda run: f"{count} node{'s' * (count > 1)}" if (count := run.machine.nodes) else None,
    "layout": lambda run: layout(run) or None,
    "engine": engine_words,
    "dtype": dtype_that_ran,
    "evidence": lambda run: grade_of(run, "matmul_dtype"),
    "fp8-scaling": lambda run: run.ran.fp8_scaling if run.ran.matmul_dtype in {"fp8", "fp4"} else "",
    "tokens": tokens_per_step,
    "sequence": lambda run: sequence_words(run) if _seen(run).documents else run.ran.sequence_tokens,
    "options": _options,
    "shape": _shape,
    "optimizer-states": _optimizer_states,
    "sequence-parallel": lambda run: {True: "on", False: "off", None: None}[_seen(run).sequence_parallel],
    "data": lambda run: re.sub(r" \(seed \d+\)", "", _seen(run).data or "") or None,
    "processor": processors,
    "clock": lambda run: {"step_end": "TPrimat", "framework": "framework"}[run.clock],
    "environment": lambda run: None if run.environment is None else _listed(run.environment.items(), "="),
    "software": lambda run: _listed(sorted(run.software.items()), " ") or None,
}
"""Traits that no field of a record has; data/traits.yaml says where the others stand."""


def _trait(key: str, at: str = "", of: Literal["gpu", "experts"] | None = None, **facts: Any) -> Trait:
    value = COMPUTED.get(key) or attrgetter(at)

    def known(run: RunRecord) -> object:
        experts = run.ran.shape is not None and run.ran.shape.experts is not None
        lacks = (of == "gpu" and run.machine.platform == "cpu") or (of == "experts" and not experts)
        return "" if lacks else value(run)

    return Trait(value=known, **facts)


TABLE = document(DATA / "traits.yaml")
TRAITS: Mapping[str, Trait] = {key: _trait(key, **row) for key, row in TABLE["traits"].items()}
"""What distinguishes configurations, in the order in which a label names it."""
LISTS = ("options", "environment", "software", "shape")
"""Traits of many words each, of which labels and sentences name only those that differ."""
OF_ACCELERATOR = ("power-limit", "driver", "processor", "environment")
"""Traits that another accelerator cannot share."""
FORBIDDING = tuple(key for key, trait in TRAITS.items() if trait.effect == "refuse")
"""Traits whose difference forbids a comparison."""


@dataclass(frozen=True, slots=True)
class DifferingTrait:
    """A trait in which two runs differ, or may differ because one does not record it."""

    key: str
    words: tuple[str, str]
    """The values in words; of a list only the parts that differ."""
    effect: Effect

    @property
    def name(self) -> str:
        """Return the trait's name for readers."""
        return TRAITS[self.key].name


def differing_traits(
    first: RunRecord, second: RunRecord, varying: Collection[str] = (), among: Iterable[str] = TRAITS
) -> list[DifferingTrait]:
    """Return each trait in which two runs differ, with its effect on comparing them. Unknown is not equal.

    A trait that neither records is among them only if it then forbids the comparison; `unrecorded` lists the others. Traits that
    are the question (`varying`) are listed; if there are some, the others that would be listed are warned of.
    """
    differing = []
    same_accelerator = accelerator_name(first) == accelerator_name(second)
    for key in among:
        trait = TRAITS[key]
        one, other = trait.value(first), trait.value(second)
        effect = trait.effect if None not in {one, other} else trait.unknown or trait.effect
        if one == other and (one is not None or effect != "refuse"):
            continue
        if key == "fp8-scaling" and "" in {one, other}:  # then the dtype differs, which says more
            continue
        if key in varying or (key in OF_ACCELERATOR and not same_accelerator):
            effect = "list"
        elif varying and effect == "list":
            effect = "warn"
        words = trait.label(first), trait.label(second)
        both = _parts_apart(*words) if key in LISTS and None not in {one, other} else words
        differing.append(DifferingTrait(key, (both[0] or f"no {trait.name}", both[1] or f"no {trait.name}"), effect))
    return differing


def unrecorded(first: RunRecord, second: RunRecord) -> list[str]:
    """Return the names of the traits that neither of two runs records, so that they are not known to be equal."""
    return [trait.name for trait in TRAITS.values() if trait.value(first) is None and trait.value(second) is None]


MOST_PARTS = 2
"""Options or packages that a difference names; more are counted."""


def _parts_apart(one: str, other: str) -> tuple[str, str]:
    mine, theirs = one.split(", "), other.split(", ")
    first = few([part for part in mine if part not in theirs], MOST_PARTS)
    second = few([part for part in theirs if part not in mine], MOST_PARTS)
    return first or f"without {second}", second or f"without {first}"


def few(parts: Sequence[str], most: int) -> str:
    """Return 'a, b', of more than `most` parts the first ones and how many more: 'a, b and 3 more'."""
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")
