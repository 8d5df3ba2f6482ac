"""What a line of a log says: its fields, and its numbers, units and switches as values; how a framework writes its lines."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tprimat.core.limits import LARGEST_WHOLE
from tprimat.core.rows import DATA, document
from tprimat.records.schema import RunRecord


@dataclass(slots=True, kw_only=True)
class LineFields:
    """What one line of a training log states. None: not on this line. Units are SI, whatever the log prints."""

    step: int | None = None
    total_steps: int | None = None
    step_seconds: float | None = None
    mean_since_reset: bool = False
    """The time is a mean over all steps since the framework last reset its timer, as Megatron-LM prints."""
    tokens_per_second_per_gpu: float | None = None
    tokens_per_second: float | None = None
    """All ranks together."""
    sequences_per_second: float | None = None
    """All ranks together."""
    stamp: float | None = None
    """When the line was printed, in seconds."""
    tflops_per_gpu: float | None = None
    """Model TFLOP/s as the framework counts them, without recomputation."""
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    global_batch_sequences: int | None = None
    consumed_sequences: int | None = None
    """Of all steps so far."""
    sequence_tokens: int | None = None
    """Where the line of a step states it: it grows in curriculum learning."""
    failed: bool = False
    """The framework skipped the update or counted a NaN."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    """All memory in use on the device, including that of other processes. Not a peak of this run."""
    device_used_share: float | None = None
    """The same, of the device's memory: 0..1."""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """Field of records.schema.Evidence -> value, where the line shows what the framework runs."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Megatron's arguments that describe the model and how it is computed, as printed."""
    dump: Literal["begins", "ends"] | None = None
    """The line opens or closes Megatron's dump of its resolved arguments, which outranks settings printed elsewhere."""
    accelerator: str | None = None
    finished: bool = False
    """The line states that training is done."""
    run: RunRecord | None = None
    """The line begins a run of TPrimat, whose record this is."""


Reader = Callable[[str], LineFields | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """How one framework writes its log."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    """A line that holds all words of one row is in this dialect."""
    rules: Mapping[str, Reader]
    """Words -> what reads a line that holds them. The first one that finds a field counts."""
    marks_its_end: bool = True
    """Whether a log without a closing line was cut short."""

    def speaks(self, text: str) -> bool:
        """Whether only this dialect, or one further down in DIALECTS, writes such a line."""
        return any(all(word in text for word in sign) for sign in self.signs)

    def read_line(self, text: str) -> LineFields | None:
        """Return the fields of a line; None where it has none."""
        readings = (read(plain(text)) for words, read in self.rules.items() if words in text)
        return next((fields for fields in readings if fields is not None), None)


def matching(pattern: str, fields: Callable[[re.Match[str]], LineFields | None]) -> Reader:
    """Return what reads a line that matches a pattern."""
    search = re.compile(pattern).search
    return lambda text: fields(match) if (match := search(text)) else None


def rules_of(dialect: str) -> dict[str, Reader]:
    """Return what reads the lines of a dialect that data/log_lines.yaml has."""
    return {row["words"]: _rule(**row) for row in LINES[dialect]}


OF_A_STEP = ("loss", "step_seconds", "tflops_per_gpu", "learning_rate")


def _rule(
    words: str,
    pattern: str = "",
    values: Mapping[str, str] = MappingProxyType({}),
    evidence: Mapping[str, object] | None = None,
    arguments: Mapping[str, str] | None = None,
    **run: Any,
) -> Reader:
    """Return what reads lines by a row of log_lines.yaml."""

    def fields(match: re.Match[str]) -> LineFields | None:
        texts = {name: values.get(text, text) for name, text in match.groupdict().items() if text is not None}
        named = {name.lower(): text for name, text in texts.items() if name.isupper()}
        facts: dict[str, Any] = {name: text for name, text in texts.items() if not name.isupper()}
        facts |= {name: count(digits) for name, text in facts.items() if (digits := text.replace(",", "")).isdigit()}
        of_run: dict[str, Any] = {name: facts.pop(name) for name in ("total_steps", "accelerator", "step") if name in facts}
        of_run |= {name: number(str(facts.pop(name))) for name in OF_A_STEP if name in facts}
        return LineFields(evidence={**facts, **(evidence or {})}, arguments={**named, **(arguments or {})}, **of_run, **run)

    return matching(pattern.replace("PREFIX", LAUNCHER_PREFIX) or re.escape(words), fields)


GIBIBYTE = 2**30
LINES = document(DATA / "log_lines.yaml")
MOST: Mapping[str, int] = document(DATA / "tolerances.yaml")["most"]
NAMED_FIELDS = [(name, field, unit) for field, names in LINES["fields"].items() for name, unit in names.items()]
"""Names of values, with the field of a step that each states and its unit."""
ESCAPES, LAUNCHER_PREFIX = re.compile(LINES["escapes"]), LINES["prefix"]
COUNTS = {"global_batch_sequences", "consumed_sequences", "sequence_tokens"}
TOKEN_RATE, OF_GPU = re.compile(LINES["token_rates"]), re.compile(LINES["of_gpu"])
LEADING_NUMBER = re.compile(r"\s*([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf))(k\b)?", re.IGNORECASE)
NONE = {"None", "null"}
"""An argument that is not set, as Python and YAML print it."""


def plain(text: str) -> str:
    """Return the line without terminal colors and other control sequences."""
    return ESCAPES.sub("", text) if "\x1b" in text or "[0m" in text else text


def stated(parts: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a step that named values of a line state, rates in tokens under any name among them."""
    parts = {name.replace("_", " ").replace("-", " "): text for name, text in parts.items()}
    values: dict[str, Any] = {}
    for name, field_name, unit in NAMED_FIELDS:
        if name in parts and values.get(field_name) is None:
            values[field_name] = value_of(field_name, parts[name], unit)
    rates = {name: text for name, text in parts.items() if TOKEN_RATE.search(name)}
    of_gpu = next((text for name, text in rates.items() if OF_GPU.search(name)), None)
    every = next((text for name, text in rates.items() if not OF_GPU.search(name)), None)
    return values | {"tokens_per_second_per_gpu": number(of_gpu), "tokens_per_second": number(every)}


def value_of(name: str, text: str, unit: float) -> float | None:
    """Return the value of a field: whole for counts, of which 0 is none, and bytes."""
    if name.endswith("_bytes"):
        return in_bytes(text, unit)
    return whole(text) or None if name in COUNTS else scaled(number(text), unit)


def pairs(text: str, sign: str = ": ") -> dict[str, str]:
    """Split ' a: 1 | b_c: 2 |' into {'a': '1', 'b c': '2'}."""
    parts = (part.rpartition(sign) for part in text.split("|"))
    return {name.strip().replace("_", " "): value.strip() for name, there, value in parts if there}


def number(text: str | None) -> float | None:
    """Return the leading number of '9836.3/21761.7', ' 4,376', '1.0E-05', 'nan' or '119.02GiB'; None for 'N/A' and torn text."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        match = LEADING_NUMBER.match(text)
        return float(match[1].replace(",", "")) * (1000 if match[2] else 1) if match else None


def whole(text: str | None) -> int | None:
    """Return the leading number where it is whole. Larger ones than a record's counts are torn text."""
    value = number(text)
    return int(value) if value is not None and abs(value) <= LARGEST_WHOLE and value == int(value) else None


def count(digits: str) -> int:
    """Return digits as a number. Longer ones than any count are torn text; their first 18 are enough to see that."""
    return int(digits[:18])


def scaled(value: float | None, factor: float) -> float | None:
    """Convert a unit; what is absent stays absent."""
    return None if value is None else value * factor


def in_bytes(text: str | None, unit: float) -> int | None:
    """Convert printed memory to bytes; None where it is absent or no finite number."""
    value = number(text)
    return None if value is None or not math.isfinite(value * unit) else round(value * unit)


def capacity(text: str) -> float | str:
    """Return the capacity of an expert that Megatron's argument states; None and negative ones are none."""
    value = number(text)
    return value if value is not None and math.isfinite(value) and value > 0 else "unlimited"


def truth(text: str) -> bool | None:
    """Return the value of 'True' or 'false', as Python and YAML print them."""
    return {"true": True, "false": False}.get(text.strip().lower())


def number_of(arguments: Mapping[str, str], name: str) -> int | None:
    """Return a whole argument; None where it is absent or None."""
    return whole(arguments.get(name))


def switch_of(arguments: Mapping[str, str], name: str) -> bool | None:
    """Return a switch; None where it is absent."""
    return truth(arguments[name]) if name in arguments else None
