"""Flags beside the log: they fill what it does not say, and may not contradict it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tprimat.cli.log_reading import LogReading
from tprimat.config.schema import Config, LayoutConfig, PlatformName
from tprimat.engines.logs.assemble import world_size
from tprimat.engines.logs.dialects import Dialect
from tprimat.errors import ConfigError
from tprimat.facts.accelerators import find_accelerator
from tprimat.facts.models import ModelShape, padded_vocabulary, parameters
from tprimat.record.schema import Evidence, Machine, Platform

PLATFORM_NAMES: dict[Platform, PlatformName] = {"cuda": "nvidia", "rocm": "amd", "cpu": "cpu"}
PARAMETER_TOLERANCE = 0.01
"""Padding of the vocabulary differs between frameworks."""
ONE_NODE_GPUS = 8
"""Up to so many GPUs are taken to stand in one node unless --num-nodes says otherwise; only per-node figures depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the user says. None: nothing."""

    model: str
    gpus: int | None = None
    nodes: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None
    accelerator: str | None = None
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A flag beside what the log says."""

    flag: str
    asked: int | str | None
    logged: int | str | None
    line: int | None


def compare(claim: Claim, log: str) -> None:
    """Refuse a flag that the log contradicts.

    Raises:
        ConfigError: names both values and the line.
    """
    if claim.asked is None or claim.logged is None or claim.asked == claim.logged:
        return
    raise ConfigError(
        f"{claim.flag} {claim.asked} contradicts the log, which says {claim.logged}.",
        where=f"{log}:{claim.line}" if claim.line else log,
        why="A record keeps what ran.",
        fix=f"leave {claim.flag} out, or give {claim.logged}",
    )


def check_flags(reading: LogReading, flags: Flags) -> None:
    """Every flag that the log speaks about."""
    said, line = reading.said.evidence, reading.said.evidence_line.get
    compare(Claim("--num-gpus", flags.gpus, world_size(said), line("world_size") or line("tensor_parallel")), reading.name)
    for flag, asked, name in (
        ("--global-batch-size", flags.global_batch_sequences, "global_batch_sequences"),
        ("--sequence-length", flags.sequence_tokens, "sequence_tokens"),
    ):
        compare(Claim(flag, asked, said.get(name), line(name)), reading.name)
    gpu, printed = flags.accelerator, reading.said.accelerator
    if gpu and printed:
        known = find_accelerator(printed)
        if known is None or find_accelerator(gpu) is not known:
            compare(Claim("--gpu", gpu, printed, line("accelerator")), reading.name)


def first_step_line(reading: LogReading) -> int | None:
    """Line of the first step."""
    return reading.said.first_line


def machine_of(reading: LogReading, flags: Flags, dialect: Dialect) -> Machine:
    """The hardware, as far as the log or the flags tell; never the machine that reads the log."""
    name = reading.said.accelerator or flags.accelerator
    gpus = world_size(reading.said.evidence) or flags.gpus
    platform = platform_of(name) or dialect.platform
    if platform is None:
        raise ConfigError(
            f"The log does not tell which GPU ran{f', and {name!r} is not known' if name else ''}.",
            where=reading.name,
            why="A result belongs to the hardware that made it, which may be another than this machine.",
            fix="--gpu with the name that torch or the SMI tool shows, such as --gpu 'NVIDIA H100 80GB HBM3' or --gpu MI300X",
        )
    vendor_platform = dialect.platform
    if vendor_platform is not None and platform != vendor_platform:
        raise ConfigError(
            f"--gpu {name} contradicts the log, which {dialect.name} wrote.",
            where=f"{reading.name}:{first_step_line(reading)}",
            why=f"{dialect.name} runs on {PLATFORM_NAMES[vendor_platform].upper()} accelerators only.",
        )
    nodes = flags.nodes or (1 if gpus is not None and gpus <= ONE_NODE_GPUS else None)
    if gpus is not None and nodes is None:
        raise ConfigError(
            f"The log does not tell over how many nodes its {gpus} GPUs are spread.", where=reading.name, fix="--num-nodes N"
        )
    if gpus is not None and nodes is not None and gpus % nodes:
        raise ConfigError(f"--num-nodes {nodes} does not divide {gpus} GPUs.", where="--num-nodes")
    return Machine(
        platform=platform,
        accelerator=name,
        gpus_per_node=None if gpus is None or nodes is None else gpus // nodes,
        nodes=nodes,
    )


def platform_of(accelerator: str | None) -> Platform | None:
    """By the table of accelerators, else by the vendor's name in it."""
    if accelerator is None:
        return None
    known = find_accelerator(accelerator)
    if known is not None:
        return "cuda" if known.vendor == "NVIDIA" else "rocm"
    words = accelerator.lower()
    if "nvidia" in words:
        return "cuda"
    return "rocm" if "amd" in words or "instinct" in words else None


def check_strategy(reading: LogReading, evidence: Evidence, flags: Flags, machine: Machine, config: Config) -> None:
    """A strategy is a claim about the split: where config.yaml says what it means, the log must agree."""
    if flags.strategy is None:
        return
    if flags.strategy not in config.parallelism:
        raise ConfigError(
            f"There is no strategy {flags.strategy!r}.", where="--parallel", fix=f"one of {', '.join(config.parallelism)}"
        )
    layout = config.parallelism[flags.strategy].get(flags.model, {}).get(PLATFORM_NAMES[machine.platform])
    for wanted, name in split_claims(layout):
        logged = getattr(evidence, name)
        line = reading.said.evidence_line.get(name)
        if logged is not None and logged != wanted:
            raise ConfigError(
                f"--parallel {flags.strategy} contradicts the log: it means {name} {wanted}, the log says {logged}.",
                where=f"{reading.name}:{line}" if line else reading.name,
                why="A strategy is what ran, not what was asked for.",
                fix="leave --parallel out, or name the strategy that ran",
            )


def check_model(reading: LogReading, shape: ModelShape, evidence: Evidence, flags: Flags) -> None:
    """The model decides on FLOP and MFU: where the log counts its parameters, they must be those of the shape."""
    counted, line = evidence.parameters, reading.said.evidence_line.get("parameters")
    expected = parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total
    if counted is None or abs(counted / expected - 1) <= PARAMETER_TOLERANCE:
        return
    raise ConfigError(
        f"--model-name {flags.model} contradicts the log: {shape.name} has {expected:,} parameters, the log counts {counted:,}.",
        where=f"{reading.name}:{line}" if line else reading.name,
        why="FLOP and MFU follow from the model.",
        fix="the model that ran, or its architecture under models in config.yaml",
    )


def split_claims(layout: LayoutConfig | None) -> Sequence[tuple[int, str]]:
    """What a layout says, as fields of Evidence."""
    if layout is None:
        return ()
    return (
        (layout.tensor_model_parallel_size, "tensor_parallel"),
        (layout.pipeline_model_parallel_size, "pipeline_parallel"),
        (layout.context_parallel_size, "context_parallel"),
    )
