"""What a configuration is: its traits in words, and which of them two runs may not differ in to be compared."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tprimat.core.accelerators import find_accelerator
from tprimat.core.models import ModelShape, family_of, models
from tprimat.records.evidence import grade_of
from tprimat.records.legacy import MODELS as USUAL_SHAPES
from tprimat.records.schema import RunRecord


def tokens_per_step(run: RunRecord) -> int | None:
    """Return the tokens of a step: observed where there is evidence, else batch times sequence length."""
    if run.evidence is not None and run.evidence.tokens_per_step is not None:
        return run.evidence.tokens_per_step
    if run.ran.global_batch_sequences is None or run.ran.sequence_tokens is None:
        return None
    return run.ran.global_batch_sequences * run.ran.sequence_tokens


def sequence_words(run: RunRecord) -> str | None:
    """Return the tokens of a sequence, and whether documents are packed or padded to fill it: '8,192 packed'."""
    filled = None if run.evidence is None else run.evidence.workload.documents
    return None if run.ran.sequence_tokens is None else f"{run.ran.sequence_tokens:,}" + (f" {filled}" if filled else "")


def work_words(run: RunRecord) -> list[str]:
    """Return what one step works on: tokens, sequence length, dtype."""
    tokens, sequence = tokens_per_step(run), sequence_words(run)
    return [
        "tokens a step not recorded" if tokens is None else f"{tokens:,} tokens a step",
        "sequence length not recorded" if sequence is None else f"sequences of {sequence}",
        dtype_that_ran(run) or "dtype not recorded",
    ]


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
    rare = (("VPP", run.ran.virtual_pipeline), ("CP", run.ran.context_parallel), ("EP", run.ran.expert_parallel))
    sizes = [("TP", run.ran.tensor_parallel), ("PP", run.ran.pipeline_parallel)]
    sizes += [(name, size) for name, size in rare if size != 1]
    return " ".join(f"{name}{size}" for name, size in (*sizes, ("DP", run.ran.data_parallel)) if size is not None)


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


PROCESSES = "processes"
"""What a CPU has in place of a number of GPUs."""
EXPERTS = "experts"
"""Part of a model, which a dense one lacks."""


def dtype_that_ran(run: RunRecord) -> str | None:
    """Return what the matrix units ran, such as bf16, and where in the model fp8 or fp4 differs from the usual recipes."""
    if run.ran.matmul_dtype not in {"fp8", "fp4"} or run.evidence is None:
        return run.ran.matmul_dtype
    seen = (("output layer", run.evidence.workload.output_layer_dtype), ("attention", run.evidence.workload.attention_dtype))
    besides, layers = " and ".join(part for part, dtype in seen if dtype == "fp8"), run.ran.layers_in_bf16 or 0
    mixture = run.ran.shape is None or run.ran.shape.experts is not None
    parts = [part for part in run.evidence.workload.wider_parts or () if mixture or part != EXPERTS]
    wider = [f"in {layers} layer{'s' * (layers > 1)}"] * (layers > 0) + [f"in {part}" for part in parts]
    return run.ran.matmul_dtype + (f" with {besides}" if besides else "") + (f" except {' and '.join(wider)}" if wider else "")


def engine_words(run: RunRecord) -> str:
    """Return the engine, and Transformer Engine where the running model was seen to have its layers."""
    seen = run.evidence is not None and run.evidence.transformer_engine
    return f"{run.engine} with Transformer Engine" if seen else run.engine


Effect = Literal["refuse", "warn", "list"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """Something in which runs of unlike configurations differ. docs/comparing.md holds the table of them."""

    name: str
    value: Callable[[RunRecord], object]
    """None where the record does not say, empty where the machine has no such thing."""
    effect: Effect
    """Of a difference on a comparison: it is refused, warned of, or listed."""
    why: str
    """What a difference does, verb first."""
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


def _ran(name: str) -> Callable[[RunRecord], object]:
    """Return a function that reads a field of what ran."""
    return lambda run: getattr(run.ran, name)


def _sequence(run: RunRecord) -> object:
    """Return the tokens of a sequence, in words where documents are packed or padded to fill it."""
    filled = None if run.evidence is None else run.evidence.workload.documents
    return sequence_words(run) if filled else run.ran.sequence_tokens


def _sequence_parallel(run: RunRecord) -> str | None:
    seen = None if run.evidence is None else run.evidence.workload.sequence_parallel
    return None if seen is None else "on" if seen else "off"


def _on_gpu(value: Callable[[RunRecord], object]) -> Callable[[RunRecord], object]:
    """Return a function that reads a value that a CPU does not have."""
    return lambda run: "" if run.machine.platform == "cpu" else value(run)


def processors(run: RunRecord) -> str | None:
    """Return the processors of a run's nodes, each kind once: 'AMD EPYC 9654 with 64 cores'; None where a node does not say."""
    if not run.nodes or any(node.processor is None for node in run.nodes):
        return None
    kinds = dict.fromkeys((node.processor, node.cores) for node in run.nodes)
    return " and ".join(f"{name} with {cores} core{'s' * (cores != 1)}" if cores else str(name) for name, cores in kinds)


def _shape(run: RunRecord) -> str | None:
    """Return what changes the work of a token: all dimensions, and whatever a model has that most have not."""
    shape = run.ran.shape
    if shape is None:
        return None
    parts = [f"{shape.heads}/{shape.kv_heads} heads", f"ffn {shape.ffn}", f"vocabulary {shape.vocabulary}", *_experts(shape)]
    if shape.head_dim * shape.heads != shape.hidden:
        parts.append(f"heads of {shape.head_dim}")
    if shape.kv_lora_rank:
        ranks = f"{shape.q_lora_rank or 'no'} and {shape.kv_lora_rank}"
        parts.append(f"latent attention of ranks {ranks}, {shape.nope_head_dim}+{shape.rope_head_dim} to {shape.value_head_dim}")
    unusual = (
        ("ungated ffn", not shape.gated),
        (shape.norm, shape.norm != "rmsnorm"),
        ("biases", shape.linear_bias),
        ("biases of queries, keys and values", shape.qkv_bias),
        ("normalized queries and keys", shape.qk_norm),
        ("tied embeddings", shape.tied_embeddings),
        (f"{shape.position} positions", shape.position != "rope"),
    )
    return f"{shape.layers} layers of {shape.hidden} ({', '.join([*parts, *(words for words, has in unusual if has)])})"


def _experts(shape: ModelShape) -> list[str]:
    """Return a model's experts in words; empty for a dense one."""
    if shape.experts is None:
        return []
    also = ((shape.shared_experts, "shared"), (shape.dense_first_layers, "dense layers"))
    chosen = f"{shape.experts_per_token} of {shape.experts} experts of {shape.expert_ffn}"
    return [chosen, *(f"{count} {words}" for count, words in also if count)]


def _optimizer_states(run: RunRecord) -> str | None:
    """Return the dtype of masters and moments, and whose they are unless Adam's: another optimizer computes something else."""
    value, optimizer = run.ran.optimizer_states, run.ran.optimizer
    other = optimizer if optimizer and "adam" not in optimizer.lower() else None
    if value is None:
        return f"unknown dtypes ({other})" if other else None
    return f"{value} ({other})" if other else value


def _fp8_scaling(run: RunRecord) -> str | None:
    """Return how values are scaled to 8 or 4 bits; empty for other dtypes."""
    return run.ran.fp8_scaling if run.ran.matmul_dtype in {"fp8", "fp4"} else ""


def _data(run: RunRecord) -> str | None:
    data = None if run.evidence is None else run.evidence.workload.data
    return None if data is None else re.sub(r" \(seed \d+\)", "", data)


IN_THE_DTYPE = ("fp8_output_layer", "first_last_layers_bf16")
"""Options that the dtype names: told again as options, they would be a second difference, and one from records before them."""
LATER_SWITCHES = ("cuda_graphs", "fully_shard")
"""Switches of the embedded engine that older records lack: they ran as with the switch off."""
DEFAULT_OPTIONS = "default options"
NO_OPTIONS = (DEFAULT_OPTIONS, "options unknown")
"""Words for the options of a run that records none: of ours, or of a log."""


def options_of(run: RunRecord) -> dict[str, object]:
    """Return the options of an engine by which runs differ, in alphabetical order: a later switch counts only where it is on."""
    options = sorted(run.engine_options.items())
    return {name: value for name, value in options if value is not False or name not in LATER_SWITCHES}


def _options(run: RunRecord) -> str | None:
    """Return the options of an engine; None where a log prints none, which does not make them the default ones."""
    named = (f"{name}={value}" for name, value in options_of(run).items() if name not in IN_THE_DTYPE)
    unknown = run.evidence is not None and run.evidence.source == "log"
    return ", ".join(named) or (None if unknown else DEFAULT_OPTIONS)


def _software(run: RunRecord) -> str | None:
    return ", ".join(f"{name} {version}" for name, version in sorted(run.software.items())) or None


def _environment(run: RunRecord) -> str | None:
    """Return the variables that tune a run."""
    return None if run.environment is None else ", ".join(f"{name}={value}" for name, value in run.environment.items())


def _routing(run: RunRecord) -> str | None:
    """Return how tokens chose experts: None where a model with experts does not say, empty for a model without any."""
    return run.ran.routing if run.ran.shape is not None and run.ran.shape.experts is not None else ""


def _expert_capacity(run: RunRecord) -> object:
    """Return what an expert takes before it drops tokens; empty for a model without experts."""
    return run.ran.expert_capacity if run.ran.shape is not None and run.ran.shape.experts is not None else ""


def routing_words(run: RunRecord) -> str:
    """Return how tokens chose experts, in words; empty for a model without any."""
    return TRAITS["routing"].label(run)


TRAITS: Mapping[str, Trait] = {
    "model": Trait(
        name="model",
        value=model_name,
        effect="refuse",
        why="Changes the work of every token.",
    ),
    "accelerator": Trait(name="accelerator", value=accelerator_name, effect="list", why="Is often what you compare."),
    "gpus": Trait(
        name="GPU count",
        value=ranks,
        effect="refuse",
        why="Changes the communication; `tprimat scaling` compares numbers of GPUs.",
    ),
    "nodes": Trait(
        name="nodes",
        value=lambda run: run.machine.nodes and f"{run.machine.nodes} node{'s' * (run.machine.nodes > 1)}",
        effect="warn",
        why="Adds the network between nodes to the result.",
    ),
    "strategy": Trait(name="strategy", value=lambda run: run.strategy, effect="list", why="Is often what you compare."),
    "layout": Trait(name="layout", value=lambda run: layout(run) or None, effect="list", why="Is often what you compare."),
    "engine": Trait(name="engine", value=engine_words, effect="list", why="Is often what you compare."),
    "dtype": Trait(
        name="dtype that ran",
        value=dtype_that_ran,
        effect="refuse",
        why="Changes the cost of every product. The dtype that ran is not always the one in the label.",
    ),
    "evidence": Trait(
        name="evidence of the dtype",
        value=lambda run: grade_of(run, "matmul_dtype"),
        words="dtype {}",
        effect="warn",
        why="Leaves doubt: a dtype that is only stated may not have run.",
    ),
    "fp8-scaling": Trait(
        name="fp8 scaling",
        value=_fp8_scaling,
        words="{} scaling",
        effect="warn",
        unknown="list",
        why="Takes more or fewer passes over memory, and changes the losses.",
    ),
    "routing": Trait(
        name="routing",
        value=_routing,
        words="{} routing",
        effect="refuse",
        why="Hides load imbalance if balance is forced, or shows another one if a bias is: real training does neither.",
    ),
    "expert-capacity": Trait(
        name="expert capacity",
        value=_expert_capacity,
        words="expert capacity {}",
        effect="refuse",
        unknown="warn",
        why="Drops tokens, which then cost no time and train nothing.",
    ),
    "global-batch": Trait(
        name="global batch",
        value=_ran("global_batch_sequences"),
        words="GBS {}",
        effect="list",
        why="Counts through tokens a step and sequence length, which have their own rows.",
    ),
    "micro-batch": Trait(
        name="micro-batch",
        value=_ran("micro_batch_sequences"),
        words="micro-batch {}",
        effect="list",
        why="Splits the same work differently.",
    ),
    "tokens": Trait(
        name="tokens a step",
        value=tokens_per_step,
        words="{:,} tokens a step",
        effect="refuse",
        why="Spreads the optimizer and the gradient reduction over more or fewer tokens.",
    ),
    "sequence": Trait(
        name="sequence length",
        value=_sequence,
        words="s{}",
        effect="refuse",
        why="Changes the attention work per token, as packing does; padding adds tokens that train nothing.",
    ),
    "recompute": Trait(
        name="recompute",
        value=_ran("recompute_words"),
        words="recompute {}",
        effect="list",
        why="Trades time for memory.",
    ),
    "clock": Trait(
        name="clock",
        value=lambda run: run.clock,
        words="clock {}",
        effect="refuse",
        why="Times something else: a framework's own timer may leave out data loading or other ranks.",
    ),
    "options": Trait(name="options", value=_options, effect="list", why="Configures the engine."),
    "shape": Trait(
        name="model's shape",
        value=_shape,
        effect="refuse",
        unknown="warn",
        why="Changes the work: models of one name may differ in layers, widths or experts.",
    ),
    "optimizer-states": Trait(
        name="optimizer states",
        value=_optimizer_states,
        words="optimizer states in {}",
        effect="refuse",
        unknown="warn",
        why="Moves fewer bytes without fp32 masters and moments; another optimizer than Adam computes something else.",
    ),
    "attention": Trait(
        name="attention",
        value=_ran("attention"),
        words="attention {}",
        effect="list",
        why="Selects a kernel; the work is the same.",
    ),
    "optimizer": Trait(
        name="optimizer",
        value=_ran("optimizer"),
        words="optimizer {}",
        effect="list",
        why="Selects a kernel, or shards the states differently.",
    ),
    "weights": Trait(
        name="weights",
        value=_ran("parameter_dtype"),
        words="weights in {}",
        effect="list",
        why="Names the dtype of the stored weights, not of the products.",
    ),
    "gradients": Trait(
        name="gradients",
        value=_ran("gradient_dtype"),
        words="gradients in {}",
        effect="warn",
        why="Changes the bytes to reduce and the rounding of the sums.",
    ),
    "sequence-parallel": Trait(
        name="sequence parallel",
        value=_sequence_parallel,
        words="sequence parallel {}",
        effect="list",
        why="Splits activations differently under tensor parallelism.",
    ),
    "data": Trait(
        name="data",
        value=_data,
        words="data {}",
        effect="warn",
        why="Changes the loading time in each step, and the losses.",
    ),
    "power-limit": Trait(
        name="power limit",
        value=_on_gpu(lambda run: run.machine.power_limit_watts),
        words="{:.0f} W",
        effect="warn",
        why="Caps the clocks. Listed if the accelerators differ.",
    ),
    "driver": Trait(
        name="driver",
        value=_on_gpu(lambda run: run.machine.driver),
        words="driver {}",
        effect="warn",
        why="Changes clocks and kernels. Listed if the accelerators differ.",
    ),
    "processor": Trait(
        name="processor",
        value=_on_gpu(processors),
        words="processor {}",
        effect="warn",
        unknown="list",
        why="Launches kernels: the GPUs may wait for it. Listed if the accelerators differ.",
    ),
    "environment": Trait(
        name="environment",
        value=_environment,
        effect="warn",
        unknown="list",
        why="Tunes communication, memory or kernels by variables. Listed if the accelerators differ.",
    ),
    "software": Trait(name="software", value=_software, effect="list", why="Changes the versions of packages."),
}
"""What distinguishes configurations, in the order in which a label names it."""
LISTS = {"options": "{} not recorded", "environment": "without {}", "software": "without {}"}
"""Traits of many words each, of which a label names only those that distinguish runs -> words for one that a run lacks."""
NO_VARIABLES = "no variables"
OF_ACCELERATOR = ("power-limit", "driver", "processor", "environment")
"""Traits that another accelerator cannot share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingTrait:
    """A trait in which two runs differ, or may differ because one does not record it."""

    key: str
    first: object
    """Value; None: not recorded."""
    second: object
    words: tuple[str, str]
    """The values in words; of a list only the parts that differ."""
    effect: Effect

    @property
    def name(self) -> str:
        """Return the trait's name for readers: of a number of GPUs 'processes' where both sides ran on a CPU."""
        on_cpu = self.key == "gpus" and all("process" in str(value) for value in (self.first, self.second))
        return PROCESSES if on_cpu else TRAITS[self.key].name


FORBIDDING = tuple(key for key, trait in TRAITS.items() if trait.effect == "refuse")
"""Traits whose difference forbids a comparison."""


def differing_traits(
    first: RunRecord, second: RunRecord, varying: Collection[str] = (), among: Iterable[str] = TRAITS
) -> list[DifferingTrait]:
    """Return each trait in which two runs differ, with its effect on comparing them. Unknown is not equal.

    A trait that neither records is among them only if it then forbids the comparison; `unrecorded` lists the others. Traits that
    are the question (`varying`) are listed; where there are some, what would be listed is warned of.
    """
    found = []
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
        found.append(DifferingTrait(key=key, first=one, second=other, words=_sides(key, first, second), effect=effect))
    return found


def unrecorded(first: RunRecord, second: RunRecord) -> list[str]:
    """Return the names of the traits that neither of two runs records, so that they are not known to be equal."""
    return [trait.name for trait in TRAITS.values() if trait.value(first) is None and trait.value(second) is None]


def _sides(key: str, first: RunRecord, second: RunRecord) -> tuple[str, str]:
    trait = TRAITS[key]
    one, other = trait.label(first), trait.label(second)
    if key == "environment" and "" in {one, other}:
        return one or NO_VARIABLES, other or NO_VARIABLES
    if key in LISTS and None not in {trait.value(first), trait.value(second)}:
        parts = one.split(", "), other.split(", ")
        one, other = (few([part for part in mine if part not in theirs], MOST_PARTS) for mine, theirs in (parts, parts[::-1]))
        one, other = one or LISTS[key].format(_names_of(other)), other or LISTS[key].format(_names_of(one))
    return one, other


MOST_PARTS = 2
"""Options or packages that a difference names; more are counted."""


def few(parts: Sequence[str], most: int, between: str = ", ") -> str:
    """Return 'a, b', of more than `most` parts the first ones and how many more: 'a, b and 3 more'."""
    return between.join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")


def _names_of(parts: str) -> str:
    return ", ".join(name_of_part(part) for part in parts.split(", "))


def name_of_part(part: str) -> str:
    """Return the name in 'load_ahead=True' or 'torch 2.11.0'."""
    return part.replace("=", " ").split(" ")[0]
