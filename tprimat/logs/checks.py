"""What a log and its reader state, checked against each other: batch, hardware, model, and the numbers that follow from them."""

import difflib
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

from tprimat.core import units
from tprimat.core.accelerators import Accelerator, Backend, accelerators, called, find_accelerator, resembling, taken_as
from tprimat.core.errors import ConfigError
from tprimat.core.flops import flop_per_token, parameters
from tprimat.core.models import ModelShape, model_shape, models, padded_vocabulary
from tprimat.core.rows import placed
from tprimat.logs.contents import AUTO, FLAGS, MODEL_FLAG, Claims, LogContents, LoggedStep, check_claim
from tprimat.logs.fields import LINES, MOST
from tprimat.logs.formats.megatron import RANK_PARAMETERS
from tprimat.logs.parse import Device, LogReading
from tprimat.logs.shape import cautions_of, differences, other_work, shape_of_arguments
from tprimat.logs.times import batch_of, rate_of, tokens_of, tokens_of_rates
from tprimat.records.evidence import CAUTION
from tprimat.records.schema import Evidence, Machine

USUAL_TOKENS = 8192
"""Of a sequence, where no line or flag states them."""
ONE_NODE_GPUS = 8
"""Up to this many GPUs are taken as one node unless the number of nodes is claimed; only per-node figures depend on it."""
VENDORS: Mapping[Backend, str] = LINES["vendors"]
FROM_ARGUMENTS = f"{MODEL_FLAG} auto, where the log prints its arguments, or the model that ran under models in config.yaml"
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
    seen = evidence.workload
    batch, sequence = seen.global_batch_sequences, seen.sequence_tokens
    return Claims(gpus=evidence.world_size, global_batch_sequences=batch, sequence_tokens=sequence).over(claims)


def logged_claims(contents: LogContents) -> Claims:
    """Return what the log states of what a caller may claim, or the record that TPrimat printed in it."""
    if contents.run is not None:
        return Claims(**placed("documents.claims", run=contents.run))
    sizes: dict[str, Any] = {name: contents.evidence.get(name) for name in ("global_batch_sequences", "sequence_tokens")}
    return Claims(gpus=world_size(contents.evidence), accelerator=contents.accelerator, **sizes)


def check_claims(reading: LogReading, claims: Claims) -> tuple[Claims, str]:
    """Check every claim that the log has a value for; return them with a caution about the GPU where no step was measured.

    Raises ConfigError: the log says something else; names the line.
    """
    logged, line = logged_claims(reading.contents), reading.contents.evidence_line.get
    if claims.gpus and claims.gpus < reading.contents.ranks:
        words = f"it has steps of rank {reading.contents.ranks - 1}"
        raise _contradiction(reading, f"--num-gpus {claims.gpus}", words, [], CHECK_SIZES)
    same_device = find_accelerator(claims.accelerator) is find_accelerator(logged.accelerator) is not None
    for name, flag in FLAGS.items():
        number = (line("world_size") or line("tensor_parallel")) if name == "gpus" else line(name)
        if not (name == "accelerator" and same_device):
            check_claim(
                flag, getattr(claims, name), getattr(logged, name), f"{reading.name}:{number}" if number else reading.name
            )
    return check_device(reading, claims)


def check_device(reading: LogReading, claims: Claims) -> tuple[Claims, str]:
    """Check the accelerator that a caller names against what the log shows of its devices.

    A run without a speed gets what the log shows instead, and a caution that says so. Raises ConfigError: steps were measured on
    another platform, or with memory of another size; names the lines.
    """
    known, backend = find_accelerator(claims.accelerator), platform_of(claims.accelerator)
    for line, seen in reading.devices.items() if backend else ():
        if not (words := seen_otherwise(seen, known, backend)):
            continue
        memory = f"has {units.gibibytes(known.memory_bytes)} and " if known else ""
        has = f"it shows {words}, and {known.name if known else claims.accelerator} {memory}runs {backend}"
        if reading.contents.steps:
            fix = f"leave --gpu out, or name the accelerator that ran{fitting(seen)}"
            raise _contradiction(reading, f"--gpu {claims.accelerator}", has, [line], fix)
        shown = shown_device(seen, backend or "")
        caution = f"{CAUTION}--gpu {claims.accelerator} contradicts line {line} of the log: {has}; recorded as {shown}"
        return replace(claims, accelerator=shown), caution
    return claims, ""


def fitting(seen: Device) -> str:
    """Return ': by its memory MI325X or MI350X', of the accelerators that may show what a line shows; empty where none may."""
    sized = accelerators() if seen.gib and not seen.share else called(seen.name)
    alike = " or ".join(one.name for one in sized if not seen_otherwise(seen, one, one.backend))
    return f": {'' if seen.name else 'by its memory '}{alike}" if alike else ""


def seen_otherwise(seen: Device, known: Accelerator | None, backend: Backend | None) -> str | None:
    """Return what a line shows of its devices that an accelerator, or one of that platform, is not; None: nothing."""
    if (seen.backend or platform_of(seen.name)) not in {None, backend}:
        return seen.name or seen.platform
    if known is None:
        return None
    if (named := called(seen.name)) and known not in named:
        return seen.name
    if seen.gib and any(abs(seen.gib / one - 1) < 0.005 for one in known.also_gib):  # two figures of the same memory
        return None
    total = seen.gib * units.GIBIBYTE / known.memory_bytes if seen.gib else 1.0
    # Between the least of what programs see and the memory as built.
    least = 0.0 if seen.share else 0.97 * known.usable_bytes / known.memory_bytes
    return None if least <= total <= 1.01 else f"{seen.gib:.4g} GiB on a device"


def shown_device(seen: Device, platform: str = "") -> str:
    """Return a name for devices of which a log shows no more than platform and memory, such as 'NPU of 60.96 GiB'."""
    platform = seen.platform or platform
    kind = {"cuda": "NVIDIA GPU", "rocm": "AMD GPU"}.get(platform, platform.upper())
    return seen.name or (f"{kind} of {seen.gib:.4g} GiB" if seen.gib and not seen.share else kind)


def device_note(reading: LogReading, name: str | None) -> str | None:
    """Say of a measured device without a row that it has none, and of one without a name which accelerators have its memory."""
    if not reading.contents.steps or find_accelerator(name):
        return None
    fits = next(filter(None, map(fitting, (seen for seen in reading.devices.values() if seen.name == name))), None)
    words = [f"tprimat models has no row for {name}: no MFU" if name else "", f"--gpu names what ran{fits}" if fits else ""]
    return "; ".join(filter(None, words)) or None


def machine_of(reading: LogReading, claims: Claims) -> Machine:
    """Return the hardware as the log or the claims state it; never the machine that reads the log.

    Raises ConfigError: neither names an accelerator or the nodes, or they contradict each other.
    """
    listed = reading.contents.accelerator or next((seen.name for seen in reading.devices.values() if seen.name), None)
    named = listed if reading.contents.accelerator else taken_as(claims.accelerator) or claims.accelerator or listed
    name = named or next((shown_device(seen) for seen in reading.devices.values() if seen.backend == "other"), None)
    logged = find_accelerator(reading.contents.accelerator)
    seen = reading.devices.get(reading.contents.evidence_line.get("accelerator", 0))
    if logged and seen and seen.gib and seen_otherwise(seen, logged, logged.backend):
        name = f"{name} of {seen.gib:.4g} GiB"  # a variant without a row
    platform = platform_of(name) or next((seen.backend for seen in reading.devices.values() if seen.backend), None)
    platform = "other" if platform is None and listed else platform
    if platform is None:
        near = [f"--gpu '{accelerator.name}'" for accelerator in resembling(name or "")]
        raise ConfigError(
            f"The log does not tell which GPU ran{f', and {name!r} is not known' if name else ''}.",
            where=reading.name,
            why="A result belongs to the hardware that produced it, which may differ from this machine.",
            fix=", ".join([*(near or ["a name that tprimat models lists"]), f"or --gpu 'other {name}' for a record without MFU"])
            if name
            else "--gpu with the name that torch or the SMI tool shows, such as --gpu 'NVIDIA H100 80GB HBM3' or --gpu MI300X",
        )
    gpus = world_size(reading.contents.evidence) or claims.gpus
    nodes = claims.nodes or reading.contents.evidence.get("nodes") or (1 if gpus is not None and gpus <= ONE_NODE_GPUS else None)
    if gpus is not None and nodes is None:
        raise ConfigError(f"The log does not tell how many nodes hold its {gpus} GPUs.", where=reading.name, fix="--num-nodes N")
    if gpus is not None and nodes is not None and gpus % nodes:
        raise ConfigError(f"--num-nodes {nodes} does not divide {gpus} GPUs.", where="--num-nodes")
    per_node = None if gpus is None or nodes is None else gpus // nodes
    return Machine(platform=platform, accelerator=name, gpus_per_node=per_node, nodes=nodes)


def platform_of(accelerator: str | None) -> Backend | None:
    """Return the platform of an accelerator, by the table of accelerators or by the vendor's name."""
    if known := called(accelerator):
        return known[0].backend
    words = re.findall("v[5-7][ep]|910[abc]|[a-z]+", (accelerator or "").lower())
    return next((platform for word in words for platform, vendors in VENDORS.items() if word in vendors.split()), None)


def shape_of(model: str, known: Mapping[str, ModelShape]) -> ModelShape:
    """Return the shape of a model that the caller knows, or of the table. Raises ConfigError: there is no such model."""
    try:
        return known[model] if model in known else model_shape(model)
    except ConfigError as error:
        fix = ", ".join([*difflib.get_close_matches(model, known), *filter(None, [error.fix])])
        raise ConfigError(error.what, where=MODEL_FLAG, why=error.why, fix=fix) from error


def model_of(reading: LogReading, claims: Claims, known: Mapping[str, ModelShape]) -> tuple[str, ModelShape]:
    """Return the model's name and shape: as claimed, or with `auto` as the log's arguments describe it.

    A shape that is one of the caller's models, or of the table, gets its name.

    Raises ConfigError: there is no such model, or the log does not print the whole shape.
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
    alike = {name: shape for name, shape in named.items() if counted in (parameters(shape).total, _padded_parameters(shape))}
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


def _padded_parameters(shape: ModelShape) -> int:
    return parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total


def check_model(
    reading: LogReading, shape: ModelShape, evidence: Evidence, claims: Claims, machine: Machine
) -> tuple[tuple[str, ...], ModelShape | None]:
    """Check what the log prints about the model against its shape: arguments, number of parameters, TFLOP/s.

    Return cautions, one of which says so where the log prints none of them; and the shape, None where another may have run.
    Raises ConfigError: the log contradicts the model; names the lines.
    """
    contents, line_of = reading.contents, reading.contents.evidence_line.get
    if different := differences(contents.arguments, shape):
        fix = "a log of training all weights, with full attention" if other_work(contents.arguments) else FROM_ARGUMENTS
        words = f"{'; '.join(map(str, different))} ({shape.name})"
        raise _contradiction(reading, f"{MODEL_FLAG} {claims.model}", words, [line_of(one.argument) for one in different], fix)
    expected, counted, doubts = _padded_parameters(shape), evidence.parameters, []
    if counted is not None and abs(counted / expected - 1) > 0.01:  # frameworks pad the vocabulary differently
        words = f"{shape.name} has {expected:,} parameters, the log counts {counted:,}"
        doubts = [f"{words}: another model ran"]
    if doubts and find_accelerator(machine.accelerator):  # of other devices there is no peak, and so no MFU
        lines = [line for name, line in contents.evidence_line.items() if name.startswith(("parameters", RANK_PARAMETERS))]
        fix = "the model that ran, or its architecture under models in config.yaml"
        raise _contradiction(reading, f"{MODEL_FLAG} {claims.model}", words, lines, fix)
    merged = with_evidence(claims, evidence)
    cautions = [_check_work(reading, merged), *cautions_of(contents.arguments)]
    flop = [  # of a token, with the line that prints it
        (printed * 1e12 / rate, step.line)
        for step in islice(contents.steps.values(), MOST["rates"])
        if (printed := step.tflops_per_gpu or 0.0) > 0 and (rate := rate_of(step, merged.gpus) or rate_by_time(step, merged))
    ]
    if not doubts:
        doubts += filter(None, [_check_flop(reading, claims, merged.sequence_tokens, shape, flop)])
    cautions += [*doubts, device_note(reading, machine.accelerator)]
    shown = not contents.arguments.keys().isdisjoint({"num_layers", "parameters_in_billions"})
    if not (shown or counted is not None or flop):
        cautions.append(f"nothing in the log shows which model ran; {MODEL_FLAG} {claims.model} is believed")
    return tuple(CAUTION + words for words in cautions if words), None if doubts else shape


def _contradiction(reading: LogReading, who: str, words: str, lines: Sequence[int | None], fix: str) -> ConfigError:
    numbers = ", ".join(str(line) for line in lines if line)
    why = "Tokens per second, FLOP and MFU depend on it."
    return ConfigError(f"{who} contradicts the log: {words}.", where=f"{reading.name}:{numbers}".rstrip(":"), why=why, fix=fix)


def _check_work(reading: LogReading, claims: Claims) -> str | None:
    """Check the batch by the samples that the log counts, and a step's work by its tokens/s; small differences are a caution."""
    steps = list(reading.contents.steps.values())
    growths = [
        ((step.consumed_sequences - former.consumed_sequences) / (step.step - former.step), batch_of(step, claims))
        for former, step in pairwise(steps)
        if step.consumed_sequences and former.consumed_sequences and step.consumed_sequences > former.consumed_sequences
    ]
    (grown, batch), times = Counter(growths).most_common(1)[0] if growths else ((0.0, None), 0)
    if batch is not None and grown != batch and 2 * times > len(growths):
        words = f"consumed samples grow by {grown:g} a step, the batch is {batch}"
        raise _contradiction(reading, "The log or a flag", words, [steps[1].line], CHECK_SIZES)
    rates = sorted(
        (of_gpu * claims.gpus / tokens, step.step, rate, rate * tokens / of_gpu / claims.gpus)
        for step, of_gpu in tokens_of_rates(reading.contents, claims.gpus)
        if claims.gpus and (tokens := tokens_of(step, claims)) and (rate := rate_of(step, claims.gpus))
    )
    differs = statistics.median(ratio for ratio, *_ in rates) - 1 if rates else 0.0
    if differs > 0.2 and not steps[-1].is_printed:
        return f"lines are {1 + differs:.2g} times as far apart as their rates imply: other work between them, or another batch"
    if abs(differs) <= 0.2:
        small = abs(differs) <= 0.03 or not steps[-1].is_printed  # assumed: what rounding and means of other steps explain
        return None if small else f"the printed tokens/s differ by {100 * differs:+.0f} % from those of the printed times"
    _, number, printed, ours = rates[len(rates) // 2]
    words = f"step {number} has {printed:,.0f} tokens/s/GPU, and its batch, sequence length, time and GPUs make {ours:,.0f}"
    raise _contradiction(reading, "The log or a flag", words, [reading.contents.steps[number].line], CHECK_SIZES)


def rate_by_time(step: LoggedStep, claims: Claims) -> float | None:
    """Return the tokens/s of a GPU by the printed time of a step; None where the log prints none or its work is not known."""
    tokens = tokens_of(step, claims)
    if not (step.is_printed and step.step_seconds and step.step_seconds > 0 and tokens and claims.gpus):
        return None
    return tokens / step.step_seconds / claims.gpus


def _check_flop(
    reading: LogReading, claims: Claims, known_tokens: int | None, shape: ModelShape, logged: Sequence[tuple[float, int]]
) -> str | None:
    """Refuse a shape whose FLOP are not those of the TFLOP/s in the log, whether it counts half the attention square or all.

    Only caution where the sequence length is stated nowhere, and they differ by less than 3 times.
    """
    if not logged:
        return None
    stated = claims.sequence_tokens or reading.contents.evidence.get("sequence_tokens")
    flop = statistics.median(flop for flop, _ in logged)
    known = [known_tokens, known_tokens] if known_tokens else [1, min(USUAL_TOKENS, shape.context_tokens)]
    least, most = flop_per_token(shape, known[0], "causal"), flop_per_token(shape, known[1], "full")
    near = min(abs(flop / ours - 1) for ours in (least, most)) <= 0.15
    if near or (known_tokens is None and least <= flop <= most):
        return None
    words = f"its TFLOP/s are those of {_giga(flop)} a token, {shape.name} takes {_giga(least)} (causal"
    words += (
        f") or {_giga(most)} (full) at {units.count(known[1])} tokens" if known_tokens else f", 1 token) to {_giga(most)} (full)"
    )
    longest = flop_per_token(shape, shape.context_tokens, "full")
    if not stated and (least / 3 <= flop <= most * 3 or (known_tokens is None and least <= flop <= longest)):
        return f"{words}: the model may be another, or the sequences long; give --sequence-length"
    claimed = claims.model != AUTO
    who = f"{MODEL_FLAG} {claims.model}" if claimed else "The model of the arguments"
    lines = [min(line for _, line in logged), max(line for _, line in logged)]
    raise _contradiction(reading, who, words, lines, f"{FROM_ARGUMENTS}; {CHECK_SIZES}" if claimed else CHECK_SIZES)


def _giga(flop: float) -> str:
    return f"{flop / 1e9:.3g} GFLOP"
