"""What a log and its reader state, checked against each other: batch, hardware, model, and the numbers that follow from them."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

from tprimat.core import units
from tprimat.core.accelerators import PLATFORM_OF, Backend, find_accelerator, resembling
from tprimat.core.errors import ConfigError
from tprimat.core.flops import flop_per_token, parameters
from tprimat.core.limits import finite_or_none
from tprimat.core.models import ModelShape, model_shape, models, padded_vocabulary
from tprimat.logs.claims import AUTO, MODEL_FLAG, Claims, check_claim
from tprimat.logs.contents import LogContents, LoggedStep
from tprimat.logs.fields import Dialect
from tprimat.logs.parse import LogReading
from tprimat.logs.shape import cautions_of, differences, other_work, shape_of_arguments
from tprimat.logs.times import batch_of, mean_batch, tokens_of
from tprimat.records.evidence import CAUTION
from tprimat.records.schema import Evidence, Machine, RunRecord

PARAMETER_TOLERANCE = 0.01
"""Frameworks pad the vocabulary differently."""
RATE_TOLERANCE = 0.2
"""Between the tokens/s that a log prints and those of its step times."""
FLOP_TOLERANCE = 0.15
"""Between the FLOP of a token by the log's TFLOP/s and by the shape."""
MOST_RATES = 1000
"""Lines with TFLOP/s that are looked at."""
FULL = 0.99
"""Share of a step's tokens with a loss, from which it counts as full: the last token of a sequence has none."""
ONE_NODE_GPUS = 8
"""Up to this many GPUs are taken as one node unless the number of nodes is claimed; only per-node figures depend on it."""
CHECK_SIZES = "check --sequence-length, --global-batch-size and --num-gpus, where you gave them"


def world_size(evidence: Mapping[str, Any]) -> int | None:
    """Return the total number of GPUs, as printed or as the product of the degrees. Logs omit degrees of 1."""
    if "world_size" in evidence:
        return int(evidence["world_size"])
    degrees = [evidence.get(name) for name in ("data_parallel", "tensor_parallel", "pipeline_parallel")]
    if None in degrees:
        return None
    return math.prod(int(degree) for degree in degrees if degree) * int(evidence.get("context_parallel", 1))


def with_evidence(claims: Claims, evidence: Evidence) -> Claims:
    """Return what the log states about batch and GPUs, else what is claimed."""
    return replace(
        claims,
        gpus=evidence.world_size or claims.gpus,
        global_batch_sequences=evidence.workload.global_batch_sequences or claims.global_batch_sequences,
        sequence_tokens=evidence.workload.sequence_tokens or claims.sequence_tokens,
    )


def check_claims(reading: LogReading, claims: Claims) -> None:
    """Check every claim that the log has a value for.

    Raises:
        ConfigError: the log says something else; names the line.
    """
    contents = reading.contents
    evidence, line = contents.evidence, contents.evidence_line.get
    stated = (
        ("--num-gpus", claims.gpus, world_size(evidence), line("world_size") or line("tensor_parallel")),
        (
            "--global-batch-size",
            claims.global_batch_sequences,
            evidence.get("global_batch_sequences"),
            line("global_batch_sequences"),
        ),
        ("--sequence-length", claims.sequence_tokens, evidence.get("sequence_tokens"), line("sequence_tokens")),
    )
    for flag, claimed, logged, number in stated:
        check_claim(flag, claimed, logged, f"{reading.name}:{number}" if number else reading.name)
    _check_degrees(reading, claims)
    _check_accelerator(claims.accelerator, contents.accelerator, f"{reading.name}:{line('accelerator')}")


def check_claims_of_record(run: RunRecord, claims: Claims, log: str) -> None:
    """Check every claim against the record that TPrimat itself printed.

    Raises:
        ConfigError: the record says something else.
    """
    for flag, claimed, recorded in (
        (MODEL_FLAG, None if claims.model == AUTO else claims.model, run.model),
        ("--num-gpus", claims.gpus, run.machine.gpus),
        ("--num-nodes", claims.nodes, run.machine.nodes),
        ("--global-batch-size", claims.global_batch_sequences, run.ran.global_batch_sequences),
        ("--sequence-length", claims.sequence_tokens, run.ran.sequence_tokens),
    ):
        check_claim(flag, claimed, recorded, log)
    _check_accelerator(claims.accelerator, run.machine.accelerator, log)


def _check_accelerator(claimed: str | None, logged: str | None, where: str) -> None:
    """Refuse an accelerator unless both names are of one row of the table."""
    if claimed and (find_accelerator(claimed) is None or find_accelerator(claimed) is not find_accelerator(logged)):
        check_claim("--gpu", claimed, logged, where)


def _check_degrees(reading: LogReading, claims: Claims) -> None:
    """Refuse a number of GPUs that cannot hold the degrees in the log."""
    stated = reading.contents.evidence
    degrees = {name: int(stated[name]) for name in ("tensor_parallel", "pipeline_parallel", "context_parallel") if name in stated}
    needed = math.prod(degrees.values())
    if claims.gpus is None or claims.gpus % needed == 0:
        return
    raise ConfigError(
        f"--num-gpus {claims.gpus} contradicts the log: {', '.join(f'{name} {degree}' for name, degree in degrees.items())}.",
        where=f"{reading.name}:{max(reading.contents.evidence_line[name] for name in degrees)}",
        why=f"They need a multiple of {needed} GPUs.",
        fix="--num-gpus with the number that ran",
    )


def machine_of(reading: LogReading, claims: Claims, dialect: Dialect | None) -> Machine:
    """Return the hardware as the log or the claims state it; never the machine that reads the log.

    Raises:
        ConfigError: neither names an accelerator or the nodes, or they contradict each other.
    """
    name = reading.contents.accelerator or claims.accelerator
    own, only = platform_of(name), dialect.platform if dialect else None
    alike = resembling(name or "")
    platform = own or only
    if platform is None:
        raise ConfigError(
            f"The log does not tell which GPU ran{f', and {name!r} is not known' if name else ''}.",
            where=reading.name,
            why="A result belongs to the hardware that produced it, which may differ from this machine.",
            fix=", ".join(f"--gpu '{accelerator.name}'" for accelerator in alike)
            or "--gpu with the name that torch or the SMI tool shows, such as --gpu 'NVIDIA H100 80GB HBM3' or --gpu MI300X",
        )
    named = {own} if own else {accelerator.backend for accelerator in alike}
    if dialect is not None and only is not None and named and only not in named:
        raise ConfigError(
            f"--gpu {name} contradicts the log, which {dialect.name} wrote.",
            where=f"{reading.name}:{reading.contents.first_line}",
            why=f"{dialect.name} runs on {PLATFORM_OF[only].upper()} accelerators only.",
            fix="leave --gpu out, or name the accelerator that ran",
        )
    gpus = world_size(reading.contents.evidence) or claims.gpus
    nodes = claims.nodes or (1 if gpus is not None and gpus <= ONE_NODE_GPUS else None)
    if gpus is not None and nodes is None:
        raise ConfigError(f"The log does not tell how many nodes hold its {gpus} GPUs.", where=reading.name, fix="--num-nodes N")
    if gpus is not None and nodes is not None and gpus % nodes:
        raise ConfigError(f"--num-nodes {nodes} does not divide {gpus} GPUs.", where="--num-nodes")
    per_node = None if gpus is None or nodes is None else gpus // nodes
    return Machine(platform=platform, accelerator=name, gpus_per_node=per_node, nodes=nodes)


def platform_of(accelerator: str | None) -> Backend | None:
    """Return the platform of an accelerator, by the table of accelerators or by the vendor's name."""
    if (known := find_accelerator(accelerator)) is not None:
        return known.backend
    words = (accelerator or "").lower()
    if "nvidia" in words:
        return "cuda"
    return "rocm" if "amd" in words or "instinct" in words else None


def shape_of(model: str, known: Mapping[str, ModelShape]) -> ModelShape:
    """Return the shape of a model that the caller knows, or of the table.

    Raises:
        ConfigError: there is no such model.
    """
    try:
        return known[model] if model in known else model_shape(model)
    except ConfigError as error:
        names = ", ".join([*known, f"or {error.fix}"])
        raise ConfigError(f"There is no model {model!r}.", where=MODEL_FLAG, why=error.why, fix=names) from error


def model_of(reading: LogReading, claims: Claims, known: Mapping[str, ModelShape]) -> tuple[str, ModelShape]:
    """Return the model's name and shape: as claimed, or with `auto` as the log's arguments describe it.

    A shape that is one of the caller's models, or of the table, gets its name.

    Raises:
        ConfigError: there is no such model, or the log does not print the whole shape.
    """
    if claims.model != AUTO:
        return claims.model, shape_of(claims.model, known)
    arguments = reading.contents.arguments
    named = {**known, **{shape.name: shape for shape in models().values()}}
    counted = reading.contents.evidence.get("parameters")
    if counted and "num_layers" not in arguments:
        return _model_of_size(int(counted), named, reading)
    logged = shape_of_arguments(arguments)
    for name, shape in named.items():
        # The log may not print arguments that it does not use: the same parts, too.
        same_parts = all(getattr(logged, part) == getattr(shape, part) for part in ("experts", "kv_lora_rank", "kv_heads"))
        if same_parts and not differences(arguments, shape):
            return name, shape
    return logged.name, logged


def _model_of_size(counted: int, named: Mapping[str, ModelShape], reading: LogReading) -> tuple[str, ModelShape]:
    """Return the known model with exactly the parameters that a log counts, for frameworks that print no arguments."""
    alike = {name: shape for name, shape in named.items() if counted in (parameters(shape).total, padded_parameters(shape))}
    # Versions of one model that differ in positions only take the same FLOP.
    if len({flop_per_token(shape, 1024, "full") for shape in alike.values()}) == 1:
        return next(iter(alike.items()))
    few = f"{len(alike)} of the known models have" if alike else "None of the known models has"
    raise ConfigError(
        f"{few} the {counted:,} parameters that the log counts.",
        where=f"{reading.name}:{reading.contents.evidence_line['parameters']}",
        why="This log names its model by size only.",
        fix="--model-name with the model that ran" + (f": {', '.join(alike)}" if alike else ""),
    )


def padded_parameters(shape: ModelShape) -> int:
    """Return the parameters of a shape with a padded vocabulary."""
    return parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total


def check_model(reading: LogReading, shape: ModelShape, evidence: Evidence, claims: Claims) -> tuple[str, ...]:
    """Check what the log prints about the model against its shape: arguments, number of parameters, TFLOP/s.

    Returns:
        cautions, one of which says so where the log prints none of them.

    Raises:
        ConfigError: the log contradicts the model; names the lines.
    """
    contents, name = reading.contents, reading.name
    if different := differences(contents.arguments, shape):
        lines = ", ".join(str(contents.evidence_line[one.argument]) for one in different)
        raise ConfigError(
            f"{MODEL_FLAG} {claims.model} contradicts the log: {'; '.join(map(str, different))} ({shape.name}).",
            where=f"{name}:{lines}",
            why="FLOP and MFU depend on the model.",
            fix="a log of training all weights, with full attention"
            if other_work(contents.arguments)
            else f"{MODEL_FLAG} auto, which takes the model from the log's arguments",
        )
    _check_parameters(reading, shape, evidence.parameters, claims)
    merged = with_evidence(claims, evidence)
    _check_consumed(contents, merged, name)
    _check_rates(contents, merged, name)
    _check_flop(contents, merged, shape, name)
    cautions = [*cautions_of(contents.arguments), *padding(contents, merged)]
    shown = not contents.arguments.keys().isdisjoint({"num_layers", "parameters_in_billions"})
    if not (shown or evidence.parameters is not None or any(logged_flop(contents, merged))):
        cautions.append(f"nothing in the log shows which model ran; {MODEL_FLAG} {claims.model} is believed")
    return tuple(CAUTION + words for words in cautions)


def _check_parameters(reading: LogReading, shape: ModelShape, counted: int | None, claims: Claims) -> None:
    """Check the parameters that the log counts against the model's."""
    line = reading.contents.evidence_line.get("parameters") or reading.contents.evidence_line.get("rank_parameters")
    expected = padded_parameters(shape)
    if counted is None or abs(counted / expected - 1) <= PARAMETER_TOLERANCE:
        return
    raise ConfigError(
        f"{MODEL_FLAG} {claims.model} contradicts the log: {shape.name} has {expected:,} parameters, the log counts {counted:,}.",
        where=f"{reading.name}:{line}" if line else reading.name,
        why="FLOP and MFU depend on the model.",
        fix="the model that ran, or its architecture under models in config.yaml",
    )


def padding(contents: LogContents, claims: Claims) -> list[str]:
    """Say how many of the tokens have a loss, where the log counts them and many have none.

    Raises:
        ConfigError: more have a loss than a step has tokens.
    """
    shares = [
        step.target_tokens / tokens
        for step in contents.steps.values()
        if step.target_tokens and (tokens := tokens_of(step, claims))
    ]
    if not shares or FULL <= (share := statistics.median(shares)) <= 1:
        return []
    if share > 1:
        raise ConfigError(
            f"The log contradicts itself or a flag: {share:.2f} times the tokens of its batch have a loss.",
            where="total_weights",
            fix="check --sequence-length and --global-batch-size, where you gave them",
        )
    return [f"{units.percent(share, 0)} of the tokens have a loss, the others are padding: tokens/s and MFU count all"]


def _check_consumed(contents: LogContents, claims: Claims, log: str) -> None:
    """Check the samples that the log counts against its global batch: refuse where they grow by another number in most steps."""
    growths = [
        (step, grown, batch_of(step, claims))
        for former, step in pairwise(contents.steps.values())
        if (grown := mean_batch(former, step))  # some logs of other programs repeat one number
    ]
    wrong = [growth for growth in growths if growth[2] not in {None, growth[1]}]
    if 2 * len(wrong) <= len(growths) or len({batch for _, _, batch in growths}) > 1:
        return
    step, grown, batch = wrong[0]
    raise ConfigError(
        f"The log contradicts itself or a flag: consumed samples grow by {grown:g} a step, the batch is {batch}.",
        where=f"{log}:{step.line}",
        why="Tokens per second follow from the batch.",
        fix="a log as the framework wrote it, or another --global-batch-size",
    )


def rate_by_time(step: LoggedStep, claims: Claims) -> float | None:
    """Return the tokens/s of a GPU by the printed time of a step; None where the log prints none or its work is not known."""
    tokens = tokens_of(step, claims)
    if not (step.is_printed and step.step_seconds and tokens and claims.gpus):
        return None
    return tokens / step.step_seconds / claims.gpus


def _check_rates(contents: LogContents, claims: Claims, log: str) -> None:
    """Check the tokens/s that the log prints against its step times, batch and sequence length."""
    rates = sorted(
        (printed / ours, step.step, printed, ours)
        for step in contents.steps.values()
        if (ours := rate_by_time(step, claims)) and ours > 0 and not step.restarted
        if (printed := finite_or_none(step.tokens_per_second_per_gpu)) and printed > 0
    )
    if not rates or abs(statistics.median(ratio for ratio, *_ in rates) - 1) <= RATE_TOLERANCE:
        return
    _, number, printed, ours = rates[len(rates) // 2]
    step = contents.steps[number]
    batch, sequence = batch_of(step, claims), step.sequence_tokens or claims.sequence_tokens or 0
    raise ConfigError(
        f"The log contradicts itself or a flag: step {number} has {printed:,.0f} tokens/s/GPU, and its batch, sequence length, "
        f"time and GPUs make {ours:,.0f}.",
        where=f"{log}:{step.line}",
        why=f"{batch} sequences of {sequence:,} tokens took {step.step_seconds:.4g} s on {claims.gpus} GPUs.",
        fix=CHECK_SIZES,
    )


def logged_flop(contents: LogContents, claims: Claims) -> Iterator[tuple[float, int]]:
    """Yield the FLOP of a token by the TFLOP/s of each line, with its number: over the line's tokens/s, or those of its time."""
    for step in islice(contents.steps.values(), MOST_RATES):
        flop, rate = step.tflops_per_gpu, step.tokens_per_second_per_gpu or rate_by_time(step, claims)
        if flop and rate and flop > 0 and rate > 0:
            yield flop * 1e12 / rate, step.line


def _check_flop(contents: LogContents, claims: Claims, shape: ModelShape, log: str) -> None:
    """Refuse a shape whose FLOP are not those of the TFLOP/s in the log, whether it counts half the attention square or all."""
    sequence, lines = claims.sequence_tokens, list(logged_flop(contents, claims))
    if sequence is None or not lines:
        return
    logged = statistics.median(flop for flop, _ in lines)
    causal, full = flop_per_token(shape, sequence, "causal"), flop_per_token(shape, sequence, "full")
    if min(abs(logged / ours - 1) for ours in (causal, full)) <= FLOP_TOLERANCE:
        return
    claimed = claims.model != AUTO
    raise ConfigError(
        f"{f'{MODEL_FLAG} {claims.model}' if claimed else 'The model of the arguments'} contradicts the log's TFLOP/s: "
        f"they are those of {giga(logged)} a token, "
        f"{shape.name} takes {giga(causal)} (causal) or {giga(full)} (full) at {units.count(sequence)} tokens.",
        where=f"{log}:{min(line for _, line in lines)}-{max(line for _, line in lines)}",
        why="FLOP and MFU depend on the model.",
        fix=f"{MODEL_FLAG} auto, where the log prints its arguments, or the model that ran under models in config.yaml"
        if claimed
        else CHECK_SIZES,
    )


def giga(flop: float) -> str:
    """Return FLOP as '51.2 GFLOP'."""
    return f"{flop / 1e9:.3g} GFLOP"
