"""torchtitan: `step: … loss: … memory: …GiB tps: …` (torchtitan/components/metrics.py); older versions write wps.

tps is tokens per second of one device over all steps since the previous line; memory is the allocator's reserved peak.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any

from tprimat.logs.fields import GIBIBYTE, Dialect, LineFields, count, in_bytes, matching, number, rules_of, stated, whole

FIELD = re.compile(r"(step|loss|grad_norm|memory|tps|wps|tflops):\s*(?!-\d)(\S+)")
"""Ranks without the last pipeline stage print a loss of -1, which is none."""
DEGREES = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep)=(\d+)")
DIMENSIONS = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}


def _stamp_of(text: str) -> float | None:
    stamp = re.search(r"\b20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", text)
    with suppress(ValueError):  # no day of any month
        return datetime.fromisoformat(stamp[0].replace(",", ".")).timestamp() if stamp else None
    return None


def read_step(text: str) -> LineFields | None:
    """Read one metrics line. Validation prints a similar line, which is not a training step."""
    fields = dict(FIELD.findall(text))
    step = whole(fields.get("step"))
    if step is None or "validate step" in text:
        return None
    memory, rate = fields.pop("memory", ""), fields.pop("tps", None) or fields.pop("wps", None)
    values = stated(fields) | {
        "tokens_per_second_per_gpu": number(rate),
        "stamp": _stamp_of(text),
        "peak_reserved_bytes": in_bytes(memory, GIBIBYTE) if "GiB" in memory else None,
    }
    return LineFields(step=step, **values)


def read_trainer_in_tokens(match: re.Match[str]) -> LineFields:
    """Read a batch in tokens, as since August 2026: in sequences of the longest context, where it is a whole number of them."""
    context = count(match["context"])
    evidence = {
        name: count(match[tokens]) // context
        for name, tokens in (("micro_batch_sequences", "rank"), ("global_batch_sequences", "step"))
        if context and count(match[tokens]) and count(match[tokens]) % context == 0
    }
    return LineFields(total_steps=count(match["steps"]), evidence={"sequence_tokens": context} | evidence)


def read_mesh(match: re.Match[str]) -> LineFields:
    """Read names ('dp_shard', 'tp') and sizes (4, 2), as until 2025. torchtitan builds no dimension of size 1."""
    degrees = map(count, re.findall(r"\d+", match[2]))
    return degrees_of(zip((part.strip(" '\"") for part in match[1].split(",")), degrees, strict=False))


def degrees_of(degrees: Iterable[tuple[str, int]]) -> LineFields:
    """Return named sizes of mesh dimensions; others have size 1. Experts (ep, etp) share the ranks of the others."""
    evidence: dict[str, Any] = dict.fromkeys(DIMENSIONS.values(), 1)
    world, replicas = 1, 1
    for name, degree in degrees:
        world *= 1 if name == "ep" else degree
        if name in DIMENSIONS:
            evidence[DIMENSIONS[name]] = degree
        elif name.startswith("dp"):
            replicas *= degree
    return LineFields(evidence=evidence | {"world_size": world, "data_parallel": replicas})


DIALECT = Dialect(
    name="torchtitan",
    signs=(("step:", "loss:", "tps:"), ("step:", "loss:", "memory:", "wps:")),
    rules={
        "tps:": read_step,
        "wps:": read_step,
        # 'pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=1, ep=1, etp=1'
        "mesh with parallelism: ": lambda text: degrees_of((name, count(digits)) for name, digits in DEGREES.findall(text)),
        "device mesh with": matching(r"device mesh with [\[(](.*?)[\])], [\[(]([\d, ]+)[\])]", read_mesh),
        "tokens per train step": matching(
            r"with (?P<rank>\d+) tokens per DP rank, (?P<step>\d+) tokens per train step, gradient accumulation steps \d+, "
            r"maximum context length (?P<context>\d+), total steps (?P<steps>\d+)",
            read_trainer_in_tokens,
        ),
        **rules_of("torchtitan"),
    },
)
