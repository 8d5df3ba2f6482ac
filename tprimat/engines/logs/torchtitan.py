"""torchtitan: `step: … loss: … memory: …GiB tps: …` (torchtitan/components/metrics.py); older versions write wps for tps.

tps is tokens per second of one device over all steps since the line before; memory is the peak that the allocator reserved.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from tprimat.engines.base import LineFields
from tprimat.engines.logs.text import GIBIBYTE, in_bytes, number, plain, scaled, whole
from tprimat.facts.accelerator import TERA

NAME = "torchtitan"
SIGNS = (("step:", "loss:", "tps:"), ("step:", "loss:", "wps:"))

FIELD = re.compile(r"(step|loss|grad_norm|memory|tps|wps|tflops):\s*(\S+)")
CAPACITY = re.compile(r"(?:CUDA|GPU|HIP|XPU) capacity: (.+) with ([\d.]+)GiB memory")
MESH = re.compile(r"device mesh with [\[(](.*?)[\])], [\[(]([\d, ]+)[\])]")
DIMENSIONS = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel"}
TRAINER = re.compile(
    r"(?:local batch size (?P<local>\d+), )?global batch size (?P<whole>\d+).*?"
    r"sequence length (?P<sequence>\d+), total steps (?P<steps>\d+)"
)
SIZE = re.compile(r"size: ([\d,]+) total parameters")


def read_line(text: str) -> LineFields | None:
    """What the line says; None when nothing."""
    if "tps:" in text or "wps:" in text:
        return read_step(plain(text))
    if " capacity: " in text and (match := CAPACITY.search(plain(text))):
        return LineFields(accelerator=match[1])
    if "device mesh with" in text and (match := MESH.search(plain(text))):
        return LineFields(evidence=read_mesh(match[1], match[2]))
    if "global batch size" in text and (match := TRAINER.search(plain(text))):
        evidence = {"global_batch_sequences": int(match["whole"]), "sequence_tokens": int(match["sequence"])}
        return LineFields(
            total_steps=int(match["steps"]),
            evidence=evidence | ({"micro_batch_sequences": int(match["local"])} if match["local"] else {}),
        )
    return read_fact(text)


def read_fact(text: str) -> LineFields | None:
    """The rarer lines."""
    if "total parameters" in text and (match := SIZE.search(plain(text))):
        return LineFields(evidence={"parameters": whole(match[1])})
    if "Float8" in text and "training active" in text:
        return LineFields(evidence={"matmul_dtype": "fp8"})
    if "Training completed" in text:
        return LineFields(finished=True)
    return None


def read_step(text: str) -> LineFields | None:
    """One metrics line. Validation prints a similar one, which is no training step."""
    fields = dict(FIELD.findall(text))
    step = whole(fields.get("step"))
    if step is None or "validate step" in text:
        return None
    memory = fields.get("memory")
    return LineFields(
        step=step,
        tokens_per_second_per_gpu=number(fields.get("tps") or fields.get("wps")),
        model_flops_per_second_per_gpu=scaled(number(fields.get("tflops")), TERA),
        loss=number(fields.get("loss")),
        grad_norm=number(fields.get("grad_norm")),
        peak_reserved_bytes=in_bytes(number(memory), GIBIBYTE) if memory and "GiB" in memory else None,
    )


def read_mesh(names: str, sizes: str) -> Mapping[str, Any]:
    """Names ('dp_shard', 'tp') and sizes (4, 2) -> the degrees and the world size. Dimensions of size 1 are not built."""
    degrees = [int(size) for size in sizes.split(",") if size.strip()]
    found: dict[str, Any] = {
        "world_size": math.prod(degrees),
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "context_parallel": 1,
    }
    replicas = 1
    for name, degree in zip((part.strip(" '\"") for part in names.split(",")), degrees, strict=False):
        if name in DIMENSIONS:
            found[DIMENSIONS[name]] = degree
        elif name.startswith("dp"):
            replicas *= degree
    return found | {"data_parallel": replicas}
