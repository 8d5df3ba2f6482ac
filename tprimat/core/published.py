"""Training speeds that others published, kept as printed, and restated on a common basis.

Sources count FLOP in three ways and divide by dense or sparse peaks. Each figure stays as its source prints it, with its
convention; `rebase` restates it in the `causal` convention against the dense peak. The rows are in tprimat/data/published.yaml.
"""

import math
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import cache
from typing import Any

from tprimat.core.accelerators import find_accelerator, peak_flops
from tprimat.core.errors import ConfigError
from tprimat.core.flops import FlopConvention, flop_per_token
from tprimat.core.models import models
from tprimat.core.rows import RefuseUnknownKeys, Row, read_rows
from tprimat.core.workload import Workload

FILE = "published.yaml"
FACTS = tuple(field.name for field in fields_of(Workload))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedResult(RefuseUnknownKeys):
    """One training run as its source reports it. None: the source does not say."""

    name: str
    source: str
    date: str | None
    engine: str | None
    accelerator: str | None
    """Device name for find_accelerator; None when the table does not hold the GPU."""
    gpus: int | None
    model: str
    workload: Workload
    """Its shape is one of models(); None when the table has no such model."""
    tokens_per_second_per_gpu: float | None = None
    flops_per_second_per_gpu: float | None = None
    """As printed, in `convention`."""
    mfu: float | None = None
    """As printed, a fraction of `peak_flops` in `convention`."""
    convention: FlopConvention | None = None
    peak_flops: float | None = None
    """What the source divided by."""
    notes: str | None = None

    @property
    def shape(self) -> str | None:
        """Name in models()."""
        return self.workload.shape.name if self.workload.shape else None


OTHER_TOKENS = ("torchtune",)
"""Engines whose tokens/s are not those that a model's FLOP count: torchtune counts tokens that carry loss, in packed texts whose
attention ends with each text. Our own records of it have no FLOP/s for the same reason."""


@cache
def results() -> tuple[PublishedResult, ...]:
    """Return all published training runs."""
    return read_rows(FILE, "results", PublishedResult, _result_fields)


def _result_fields(fields: Row) -> Row:
    """Gather the facts of the workload, and turn rates that a source prints for all GPUs together into rates of one GPU."""
    name, accelerator, gpus = fields.get("name"), fields.get("accelerator"), fields.get("gpus")
    if accelerator is not None and find_accelerator(accelerator) is None:
        raise ConfigError(f"There is no accelerator {accelerator!r} in accelerators.yaml.")
    workload = {name: fields.pop(name) for name in FACTS if name in fields and name != "shape"}
    shape, ranks = fields.pop("shape", None), [workload.get(name) or 1 for name in ("tensor_parallel", "pipeline_parallel")]
    if shape is not None and shape not in models():
        raise ConfigError(f"There is no model {shape!r} in models.yaml.")
    workload |= {"shape": None if shape is None else models()[shape], "matmul_dtype": fields.pop("dtype", None)}
    if fields.pop("fully_sharded", False):
        workload["weights_split_over"] = (gpus or 1) // math.prod(ranks)
    if (layers := fields.pop("recomputed_layers", None)) is not None:
        workload |= {"recompute": "full", "recompute_layers": layers}
    fields["workload"] = workload
    for rate in ("tokens_per_second", "flops_per_second"):
        printed = fields.pop(f"{rate}_all_gpus", None)
        if printed is not None and gpus is None:
            raise ConfigError(f"Result {name} gives a rate of all GPUs but not their number.")
        if printed is not None:  # a value of the wrong type is left for the type check, which names it
            numbers = isinstance(gpus, int) and isinstance(printed, int | float)
            fields[f"{rate}_per_gpu"] = printed / gpus if numbers else printed
    return fields


def facts_of(result: PublishedResult) -> dict[str, Any] | None:
    """Return what a row states of its workload and what follows of its layout; None where degrees do not divide its GPUs."""
    known, shape = result.workload, result.workload.shape
    tensor, context = known.tensor_parallel or 1, known.context_parallel or 1
    data, left = divmod(result.gpus or 0, tensor * context * (known.pipeline_parallel or 1))
    if left or not data or shape is None:
        return None
    facts = known.facts | {"data_parallel": data, "sequence_parallel": tensor > 1, "expert_parallel": 1}
    if shape.experts:  # a degree that does not divide the ranks of a stage was printed for another layout of the row
        degree = math.gcd(known.expert_parallel or shape.experts, shape.experts, data * tensor * context)
        facts |= {"expert_parallel": degree, "expert_tensor_parallel": 1}
    return facts


def rebase(result: PublishedResult) -> PublishedResult:
    """Restate a result causal and against the dense peak, from its tokens/s or else its FLOP/s; None where it says too little."""
    peak = peak_flops(result.accelerator, result.workload.matmul_dtype)
    flops, shape, tokens = result.flops_per_second_per_gpu, result.workload.shape, result.workload.sequence_tokens
    if result.convention != "causal" or flops is None:
        rate, flops = result.tokens_per_second_per_gpu, None
        if shape is not None and tokens is not None and result.engine not in OTHER_TOKENS:
            if rate is None and result.flops_per_second_per_gpu is not None and result.convention is not None:
                rate = result.flops_per_second_per_gpu / flop_per_token(shape, tokens, result.convention)
            flops = None if rate is None else rate * flop_per_token(shape, tokens)
    mfu = flops / peak if flops is not None and peak else None
    return replace(result, convention="causal", flops_per_second_per_gpu=flops, mfu=mfu, peak_flops=peak)
