"""What a log and its user state, checked against each other: model, strategy, batch, rates and hardware."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from tprimat.config.schema import Config, LayoutConfig
from tprimat.core import units
from tprimat.core.accelerators import PLATFORM_OF, Backend, find_accelerator, resembling
from tprimat.core.errors import ConfigError
from tprimat.core.flops import flop_per_token, parameters
from tprimat.core.models import ModelShape, model_shape, models, padded_vocabulary
from tprimat.logs.parse import Dialect, LogReading
from tprimat.logs.shape import cautions_of, check_flop, differences, logged_flop, other_layers, shape_of_arguments
from tprimat.logs.steps import (
    LogContents,
    Workload,
    batch_of,
    is_printed,
    mean_batch,
    sequence_of,
)
from tprimat.records.evidence import CAUTION
from tprimat.records.schema import Evidence, Machine, finite_or_none

PARAMETER_TOLERANCE = 0.01
"""Frameworks pad the vocabulary differently."""
RATE_TOLERANCE = 0.2
"""Between the tokens/s that a log prints and those of its step times."""
AUTO = "auto"
"""Instead of a model's name: take the shape from the log."""
ONE_NODE_GPUS = 8
"""Up to this many GPUs are taken as one node unless --num-nodes is given; only per-node figures depend on it."""


def merged_workload(evidence: Evidence, stated: Workload) -> Workload:
    """Return what the log states about the workload, else what the caller or the user states."""
    return Workload(
        gpus=evidence.world_size or stated.gpus,
        global_batch_sequences=evidence.global_batch_sequences or stated.global_batch_sequences,
        sequence_tokens=evidence.sequence_tokens or stated.sequence_tokens,
    )


def world_size(evidence: Mapping[str, Any]) -> int | None:
    """Return the total number of GPUs, as printed or as the product of the degrees. Logs omit degrees of 1."""
    if "world_size" in evidence:
        return int(evidence["world_size"])
    degrees = [evidence.get(name) for name in ("data_parallel", "tensor_parallel", "pipeline_parallel")]
    if None in degrees:
        return None
    return math.prod(int(degree) for degree in degrees if degree) * int(evidence.get("context_parallel", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the user states about the run. None: nothing. Flags fill in what the log omits, and must not contradict it."""

    model: str
    gpus: int | None = None
    nodes: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None
    accelerator: str | None = None
    strategy: str | None = None

    @property
    def workload(self) -> Workload:
        """Return what they state of a step."""
        return Workload(gpus=self.gpus, global_batch_sequences=self.global_batch_sequences, sequence_tokens=self.sequence_tokens)


MODEL_FLAG = "--model-name"
"""The only one that cannot be left out."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A flag next to what the log states."""

    flag: str
    requested: int | str | None
    logged: int | str | None
    line: int | None


def check_claim(claim: Claim, log: str) -> None:
    """Refuse a flag that the log contradicts."""
    if claim.requested is None or claim.logged is None or claim.requested == claim.logged:
        return
    raise ConfigError(
        f"{claim.flag} {claim.requested} contradicts the log, which says {claim.logged}.",
        where=f"{log}:{claim.line}" if claim.line else log,
        why="A record keeps what ran.",
        fix=f"auto, or {claim.logged}" if claim.flag == MODEL_FLAG else f"leave {claim.flag} out, or give {claim.logged}",
    )


def check_flags(reading: LogReading, flags: Flags) -> None:
    """Check every flag that the log has a value for."""
    evidence, line = reading.contents.evidence, reading.contents.evidence_line.get
    gpus = Claim("--num-gpus", flags.gpus, world_size(evidence), line("world_size") or line("tensor_parallel"))
    check_claim(gpus, reading.name)
    check_degrees(reading, flags)
    for flag, requested, name in (
        ("--global-batch-size", flags.global_batch_sequences, "global_batch_sequences"),
        ("--sequence-length", flags.sequence_tokens, "sequence_tokens"),
    ):
        check_claim(Claim(flag, requested, evidence.get(name), line(name)), reading.name)
    named, printed = flags.accelerator, reading.contents.accelerator
    if named and printed:
        known = find_accelerator(printed)
        if known is None or find_accelerator(named) is not known:
            check_claim(Claim("--gpu", named, printed, line("accelerator")), reading.name)


def check_degrees(reading: LogReading, flags: Flags) -> None:
    """Refuse a number of GPUs that cannot hold the degrees in the log."""
    stated = reading.contents.evidence
    degrees = {name: int(stated[name]) for name in ("tensor_parallel", "pipeline_parallel", "context_parallel") if name in stated}
    needed = math.prod(degrees.values())
    if flags.gpus is None or flags.gpus % needed == 0:
        return
    raise ConfigError(
        f"--num-gpus {flags.gpus} contradicts the log: {', '.join(f'{name} {degree}' for name, degree in degrees.items())}.",
        where=f"{reading.name}:{max(reading.contents.evidence_line[name] for name in degrees)}",
        why=f"They need a multiple of {needed} GPUs.",
        fix="--num-gpus with the number that ran",
    )


def machine_of(reading: LogReading, flags: Flags, dialect: Dialect | None) -> Machine:
    """Return the hardware as the log or the flags state it; never the machine that reads the log."""
    name = reading.contents.accelerator or flags.accelerator
    gpus = world_size(reading.contents.evidence) or flags.gpus
    vendor_platform = dialect.platform if dialect else None
    platform = platform_of(name) or vendor_platform
    if platform is None:
        known = ", ".join(f"--gpu '{accelerator.name}'" for accelerator in resembling(name or ""))
        raise ConfigError(
            f"The log does not tell which GPU ran{f', and {name!r} is not known' if name else ''}.",
            where=reading.name,
            why="A result belongs to the hardware that produced it, which may differ from this machine.",
            fix=known
            or "--gpu with the name that torch or the SMI tool shows, such as --gpu 'NVIDIA H100 80GB HBM3' or --gpu MI300X",
        )
    own = platform_of(name)
    named = {own} if own else {accelerator.backend for accelerator in resembling(name or "")}
    if dialect is not None and vendor_platform is not None and named and vendor_platform not in named:
        raise ConfigError(
            f"--gpu {name} contradicts the log, which {dialect.name} wrote.",
            where=f"{reading.name}:{reading.contents.first_line}",
            why=f"{dialect.name} runs on {PLATFORM_OF[vendor_platform].upper()} accelerators only.",
            fix="leave --gpu out, or name the accelerator that ran",
        )
    nodes = flags.nodes or (1 if gpus is not None and gpus <= ONE_NODE_GPUS else None)
    if gpus is not None and nodes is None:
        raise ConfigError(f"The log does not tell how many nodes hold its {gpus} GPUs.", where=reading.name, fix="--num-nodes N")
    if gpus is not None and nodes is not None and gpus % nodes:
        raise ConfigError(f"--num-nodes {nodes} does not divide {gpus} GPUs.", where="--num-nodes")
    return Machine(
        platform=platform,
        accelerator=name,
        gpus_per_node=None if gpus is None or nodes is None else gpus // nodes,
        nodes=nodes,
    )


def platform_of(accelerator: str | None) -> Backend | None:
    """Return the platform of an accelerator, by the table of accelerators or by the vendor's name."""
    if accelerator is None:
        return None
    known = find_accelerator(accelerator)
    if known is not None:
        return known.backend
    words = accelerator.lower()
    if "nvidia" in words:
        return "cuda"
    return "rocm" if "amd" in words or "instinct" in words else None


def check_strategy(reading: LogReading, evidence: Evidence, flags: Flags, machine: Machine, config: Config) -> None:
    """Check a strategy against the log, where config.yaml defines its degrees.

    Raises:
        ConfigError: no such strategy, or the log shows other degrees.
    """
    if flags.strategy is None:
        return
    if flags.strategy not in config.parallelism:
        raise ConfigError(
            f"There is no strategy {flags.strategy!r}.", where="--parallel", fix=f"one of {', '.join(config.parallelism)}"
        )
    layout = config.parallelism[flags.strategy].get(flags.model, {}).get(PLATFORM_OF[machine.platform])
    for degree, name in degrees_of(layout):
        logged = getattr(evidence, name)
        line = reading.contents.evidence_line.get(name)
        if logged is not None and logged != degree:
            raise ConfigError(
                f"--parallel {flags.strategy} contradicts the log: it means {name} {degree}, the log says {logged}.",
                where=f"{reading.name}:{line}" if line else reading.name,
                why="The record names the strategy that ran.",
                fix="leave --parallel out, or name the strategy that ran",
            )


def degrees_of(layout: LayoutConfig | None) -> Sequence[tuple[int, str]]:
    """Return the degrees of a layout with their fields of Evidence."""
    if layout is None:
        return ()
    return (
        (layout.tensor_model_parallel_size, "tensor_parallel"),
        (layout.pipeline_model_parallel_size, "pipeline_parallel"),
        (layout.context_parallel_size, "context_parallel"),
    )


def model_of(reading: LogReading, flags: Flags, config: Config) -> tuple[str, ModelShape]:
    """Return the model's name and shape: as the user names it, or with `auto` as the log's arguments describe it.

    A shape that is a model's of config.yaml, or a known one, gets its name.

    Raises:
        ConfigError: there is no such model, or the log does not print the whole shape.
    """
    if flags.model != AUTO:
        return flags.model, shape_of(flags.model, config)
    known = {name: shape_of(name, config) for name in config.models} | {shape.name: shape for shape in models().values()}
    counted = reading.contents.evidence.get("parameters")
    if counted and "num_layers" not in reading.contents.arguments:
        return model_of_size(int(counted), known, reading)
    logged = shape_of_arguments(reading.contents.arguments)
    for name, shape in known.items():
        # The log may not print arguments that it does not use: the same parts, too.
        same_parts = all(getattr(logged, part) == getattr(shape, part) for part in ("experts", "kv_lora_rank", "kv_heads"))
        if same_parts and not differences(reading.contents.arguments, shape):
            return name, shape
    return logged.name, logged


def model_of_size(counted: int, known: Mapping[str, ModelShape], reading: LogReading) -> tuple[str, ModelShape]:
    """Return the known model with exactly the parameters that a log counts, for frameworks that print no arguments.

    Raises:
        ConfigError: none has them, or several different ones do.
    """
    found = {name: shape for name, shape in known.items() if counted in sizes_of(shape)}
    # Versions of one model that differ in positions only take the same FLOP.
    if len({flop_per_token(shape, 1024, "full") for shape in found.values()}) == 1:
        return next(iter(found.items()))
    few = f"{len(found)} of the known models have" if found else "None of the known models has"
    raise ConfigError(
        f"{few} the {counted:,} parameters that the log counts.",
        where=f"{reading.name}:{reading.contents.evidence_line['parameters']}",
        why="This log names its model by size only.",
        fix="--model-name with the model that ran" + (f": {', '.join(found)}" if found else ""),
    )


def sizes_of(shape: ModelShape) -> set[int]:
    """Return the parameters of a shape, with its own vocabulary and with one that is padded."""
    return {parameters(replace(shape, vocabulary=words)).total for words in (shape.vocabulary, padded_vocabulary(shape))}


def check_model(reading: LogReading, shape: ModelShape, evidence: Evidence, flags: Flags) -> tuple[str, ...]:
    """Check what the log prints about the model against its shape: arguments, number of parameters, TFLOP/s.

    Returns:
        a note where the log prints none of them.

    Raises:
        ConfigError: the log contradicts the model; names the lines.
    """
    contents, name = reading.contents, reading.name
    if found := differences(contents.arguments, shape):
        lines = ", ".join(str(contents.evidence_line[difference.argument]) for difference in found)
        raise ConfigError(
            f"--model-name {flags.model} contradicts the log: "
            f"{'; '.join(str(difference) for difference in found)} ({shape.name}).",
            where=f"{name}:{lines}",
            why="FLOP and MFU depend on the model.",
            fix="a log of training all weights, with full attention"
            if other_layers(contents.arguments)
            else "--model-name auto, which takes the model from the log's arguments",
        )
    check_parameters(reading, shape, evidence, flags)
    workload = merged_workload(evidence, flags.workload)
    check_consumed(contents, workload, name)
    check_rates(contents, workload, name)
    check_flop(contents, workload, shape, name, None if flags.model == AUTO else f"--model-name {flags.model}")
    cautions = [*cautions_of(contents.arguments), *padding(contents, workload)]
    shown = not contents.arguments.keys().isdisjoint({"num_layers", "parameters_in_billions"})
    if not (shown or evidence.parameters is not None or logged_flop(contents, workload) is not None):
        cautions.append(f"nothing in the log shows which model ran; --model-name {flags.model} is believed")
    return tuple(CAUTION + words for words in cautions)


FULL = 0.99
"""Share of a step's tokens with a loss, from which it counts as full: the last token of a sequence has none."""


def padding(contents: LogContents, workload: Workload) -> list[str]:
    """Say how many of the tokens have a loss, where the log counts them and many have none.

    Raises:
        ConfigError: more have a loss than a step has tokens.
    """
    shares = [
        step.target_tokens / (batch * workload.sequence_tokens)
        for step in contents.steps.values()
        if step.target_tokens and workload.sequence_tokens and (batch := batch_of(step, workload))
    ]
    if not shares or FULL <= statistics.median(shares) <= 1:
        return []
    share = statistics.median(shares)
    if share > 1:
        raise ConfigError(
            f"The log contradicts itself or a flag: {share:.2f} times the tokens of its batch have a loss.",
            where="total_weights",
            fix="check --sequence-length and --global-batch-size, where you gave them",
        )
    return [f"{units.percent(share, 0)} of the tokens have a loss, the others are padding: tokens/s and MFU count all"]


def check_consumed(contents: LogContents, workload: Workload, log: str) -> None:
    """Check the samples that the log counts against its global batch.

    Raises:
        ConfigError: they grow by another number in most steps.
    """
    found = [
        (step, mean_batch(former, step), batch_of(step, workload))
        for former, step in pairwise(contents.steps.values())
        if mean_batch(former, step)  # some logs of other programs repeat one number
    ]
    wrong = [one for one in found if one[2] is not None and one[1] != one[2]]
    if 2 * len(wrong) <= len(found) or len({batch for _, _, batch in found}) > 1:
        return
    step, counted, batch = wrong[0]
    raise ConfigError(
        f"The log contradicts itself or a flag: consumed samples grow by {counted:g} a step, the batch is {batch}.",
        where=f"{log}:{step.line}",
        why="Tokens per second follow from the batch.",
        fix="a log as the framework wrote it, or another --global-batch-size",
    )


def check_rates(contents: LogContents, workload: Workload, log: str) -> None:
    """Check the tokens/s that the log prints against its step times, batch and sequence length.

    Raises:
        ConfigError: they differ by more than RATE_TOLERANCE.
    """
    if not (workload.gpus and workload.sequence_tokens):
        return
    found = [
        (rate * step.step_seconds * workload.gpus / (batch * sequence), rate, step)
        for step in contents.steps.values()
        if is_printed(step)
        and step.step_seconds
        and (batch := batch_of(step, workload))
        and (sequence := sequence_of(step, workload))
        if (rate := finite_or_none(step.tokens_per_second_per_gpu)) and rate > 0 and not step.restarted
    ]
    if not found or abs(statistics.median(ratio for ratio, _, _ in found) - 1) <= RATE_TOLERANCE:
        return
    _, rate, step = sorted(found, key=itemgetter(0))[len(found) // 2]
    batch, sequence, seconds = batch_of(step, workload) or 0, sequence_of(step, workload) or 0, step.step_seconds or 0.0
    ours = batch * sequence / seconds / workload.gpus
    raise ConfigError(
        f"The log contradicts itself or a flag: step {step.step} has {rate:,.0f} tokens/s/GPU, and its batch, sequence length, "
        f"time and GPUs make {ours:,.0f}.",
        where=f"{log}:{step.line}",
        why=f"{batch} sequences of {sequence:,} tokens took {seconds:.4g} s on {workload.gpus} GPUs.",
        fix="check --sequence-length, --global-batch-size and --num-gpus, where you gave them",
    )


def check_parameters(reading: LogReading, shape: ModelShape, evidence: Evidence, flags: Flags) -> None:
    """Check the parameters that the log counts against the model's."""
    counted = evidence.parameters
    line = reading.contents.evidence_line.get("parameters") or reading.contents.evidence_line.get("rank_parameters")
    expected = parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total
    if counted is None or abs(counted / expected - 1) <= PARAMETER_TOLERANCE:
        return
    raise ConfigError(
        f"--model-name {flags.model} contradicts the log: {shape.name} has {expected:,} parameters, the log counts {counted:,}.",
        where=f"{reading.name}:{line}" if line else reading.name,
        why="FLOP and MFU depend on the model.",
        fix="the model that ran, or its architecture under models in config.yaml",
    )


def unknown_model(flags: Flags, config: Config) -> ConfigError | None:
    """Return what is wrong with the name of the model; None where a model has it, or the log is to tell."""
    try:
        if flags.model != AUTO:
            shape_of(flags.model, config)
    except ConfigError as error:
        return error
    return None


def shape_of(model: str, config: Config) -> ModelShape:
    """Return the architecture of a model of config.yaml, or of a known model of that name.

    Raises:
        ConfigError: there is no such model.
    """
    if model in config.models:
        architecture = config.models[model].architecture
        return model_shape(architecture) if isinstance(architecture, str) else architecture
    try:
        return model_shape(model)
    except ConfigError as error:
        raise ConfigError(
            f"There is no model {model!r}.",
            where=MODEL_FLAG,
            why=error.why,
            fix=f"{', '.join(config.models)}, or {error.fix}",
        ) from error
