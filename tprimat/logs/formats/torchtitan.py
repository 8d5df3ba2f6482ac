"""torchtitan: `step: … loss: … memory: …GiB tps: …` (torchtitan/components/metrics.py); older versions write wps for tps.

tps is tokens per second of one device over all steps since the line before; memory is the peak that the allocator reserved.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tprimat.logs.fields import LineFields
from tprimat.logs.values import GIBIBYTE, in_bytes, number, plain, scaled, whole
from tprimat.units import TERA

NAME = "torchtitan"
SIGNS = (("step:", "loss:", "tps:"), ("step:", "loss:", "wps:"))

FIELD = re.compile(r"(step|loss|grad_norm|memory|tps|wps|tflops):\s*(\S+)")
CAPACITY = re.compile(r"(?:CUDA|GPU|HIP|XPU) capacity: (.+) with ([\d.]+)GiB memory")
MESH = re.compile(r"device mesh with [\[(](.*?)[\])], [\[(]([\d, ]+)[\])]")
DEGREES = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp)=(\d+)")
"""Of the line 'Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, …', which came for the other in 2025."""
PRECISION = re.compile(r'"mixed_precision_param": "(bfloat16|float32)"')
"""Of the configuration that --job.print_config prints."""
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
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
    if "mesh with parallelism: " in text:
        return LineFields(evidence=read_degrees(plain(text)))
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
    if "mixed_precision_param" in text and (match := PRECISION.search(text)):
        return LineFields(evidence={"matmul_dtype": DTYPES[match[1]]})
    if "Mixed precision training is disabled" in text:  # it then multiplies in the type of the parameters, training.dtype
        return LineFields(evidence={"matmul_dtype": "fp32"})
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
    return split_of(zip((part.strip(" '\"") for part in names.split(",")), degrees, strict=False))


def read_degrees(text: str) -> Mapping[str, Any]:
    """'pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=1, ep=1, etp=1': experts and their tensors are spread over the same ranks."""
    return split_of((name, int(degree)) for name, degree in DEGREES.findall(text))


def split_of(degrees: Iterable[tuple[str, int]]) -> Mapping[str, Any]:
    """Names of dimensions with their sizes, as fields of Evidence; what is not named is not split."""
    found: dict[str, Any] = dict.fromkeys(DIMENSIONS.values(), 1)
    world, replicas = 1, 1
    for name, degree in degrees:
        world *= degree
        if name in DIMENSIONS:
            found[DIMENSIONS[name]] = degree
        elif name.startswith("dp"):
            replicas *= degree
    return found | {"world_size": world, "data_parallel": replicas}
