"""Training speeds and model sizes that others published, kept as printed, and restated on a common basis.

Sources count FLOP in three ways and divide by dense or sparse peaks. Each figure stays as its source prints it, with its
convention; `rebase` restates it in the `causal` convention against the dense peak. The rows are in tprimat/data/published.yaml.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import cache, partial

from tprimat.core.accelerators import Dtype, find_accelerator, peak_dense_flops
from tprimat.core.errors import ConfigError
from tprimat.core.flops import FlopConvention, flop_per_token
from tprimat.core.models import ModelShape, models
from tprimat.core.rows import Prepare, Row, T, Units, in_si, read_rows
from tprimat.core.workload import Workload

FILE = "published.yaml"
PLACE = f"tprimat/data/{FILE}"
ROW_UNITS: Units = {
    "tflops_per_gpu": ("flops_per_second_per_gpu", 1e12),
    "tflops_all_gpus": ("flops_per_second_all_gpus", 1e12),
    "peak_tflops": ("peak_flops", 1e12),
    "gb_by_dtype": ("bytes_by_dtype", 1e9),
    "bandwidth_gb_per_second": ("bandwidth_bytes_per_second", 1e9),
    "link_gb_per_second": ("link_bytes_per_second", 1e9),
}
IN_SI = partial(in_si, units=ROW_UNITS)

FACTS = tuple(field.name for field in fields_of(Workload))

SPELLING = {"megatron": "Megatron", "nemo": "NeMo", "primus": "Primus"}
"""Frameworks whose makers write them with capitals, by the name of their engine or log format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedResult:
    """One training run as its source reports it. None: the source does not say."""

    name: str
    """Unique; chosen here."""
    source: str
    """URL, arXiv number or title of the page."""
    date: str | None
    """Year, month and day of the source, as far as it gives them."""
    engine: str | None
    accelerator: str | None
    """Device name for find_accelerator; None when the table does not hold the GPU."""
    gpus: int | None
    model: str
    """As the source calls it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebased:
    """A published result on the common basis; None where the source does not say enough."""

    flops_per_second_per_gpu: float | None
    """`causal` convention."""
    mfu: float | None
    """Of the dense peak, `causal` convention."""
    own_mfu: float | None
    """Of the dense peak, in the convention of the source: a difference from the printed MFU is an error or another peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSize:
    """Parameters of a model as a source prints them."""

    shape: str
    source: str
    total: float
    active: float | None = None
    """Parameters that one token uses."""
    active_has_input_table: bool = True
    """False where the printed figure fits only without the input embedding, of which a token reads one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """Memory that a source says the weights of a model take."""

    shape: str
    source: str
    bytes_by_dtype: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedHardware:
    """What a source says an accelerator can do."""

    accelerator: str
    """Device name for find_accelerator."""
    source: str
    peak_flops: Mapping[Dtype, float]
    """By dtype."""
    bandwidth_bytes_per_second: float
    link_bytes_per_second: float


OTHER_TOKENS = ("torchtune",)
"""Engines whose tokens/s are not those that a model's FLOP count: torchtune counts tokens that carry loss, in packed texts whose
attention ends with each text. Our own records of it have no FLOP/s for the same reason."""


@cache
def results() -> tuple[PublishedResult, ...]:
    """Return all published training runs.

    Raises:
        ConfigError: here and below, a row is not valid, or names a model or accelerator that is not in its table.
    """
    return _rows("results", PublishedResult, _result_fields)


@cache
def sizes() -> tuple[PublishedSize, ...]:
    """Return all published parameter counts."""
    return _rows("sizes", PublishedSize)


@cache
def weights() -> tuple[PublishedWeights, ...]:
    """Return all published sizes of weights in memory."""
    return _rows("weights", PublishedWeights)


@cache
def hardware() -> tuple[PublishedHardware, ...]:
    """Return all published figures of accelerators."""
    return _rows("hardware", PublishedHardware)


def _rows(section: str, kind: type[T], prepare: Prepare = IN_SI) -> tuple[T, ...]:
    """Read a section, whose models and accelerators must be in their tables."""
    rows = read_rows(FILE, section, kind, prepare)
    for row in rows:
        shape, accelerator = getattr(row, "shape", None), getattr(row, "accelerator", None)
        place = f"{PLACE}, {getattr(row, 'name', section)}"
        if shape is not None:
            _known_shape(shape, place)
        if accelerator is not None and find_accelerator(accelerator) is None:
            raise ConfigError(f"There is no accelerator {accelerator!r} in accelerators.yaml.", where=place)
    return rows


def _known_shape(name: str, place: str) -> ModelShape:
    if name not in models():
        raise ConfigError(f"There is no model {name!r} in models.yaml.", where=place)
    return models()[name]


def _result_fields(row: Row) -> Row:
    """Gather the facts of the workload, and turn rates that a source prints for all GPUs together into rates of one GPU."""
    fields = in_si(row, ROW_UNITS)
    place = f"{PLACE}, {fields.get('name')}"
    workload = {name: fields.pop(name) for name in FACTS if name in fields and name != "shape"}
    shape, ranks = fields.pop("shape", None), [workload.get(name) or 1 for name in ("tensor_parallel", "pipeline_parallel")]
    workload |= {"shape": None if shape is None else _known_shape(shape, place), "matmul_dtype": fields.pop("dtype", None)}
    if fields.pop("fully_sharded", False):
        workload["weights_split_over"] = fields.get("gpus", 1) // math.prod(ranks)
    if (layers := fields.pop("recomputed_layers", None)) is not None:
        workload |= {"recompute": "full", "recompute_layers": layers}
    fields["workload"] = workload
    for rate in ("tokens_per_second", "flops_per_second"):
        printed, gpus = fields.pop(f"{rate}_all_gpus", None), fields.get("gpus")
        if printed is not None:
            whole = isinstance(gpus, int)
            if gpus is None or (whole and gpus < 1):
                raise ConfigError(f"Result {fields.get('name')} gives a rate of all GPUs but not their number.", where=PLACE)
            # A value of the wrong type is left for the type check, which names it.
            fields[f"{rate}_per_gpu"] = printed / gpus if whole and isinstance(printed, int | float) else printed
    return fields


def rebase(result: PublishedResult) -> Rebased:
    """Restate a result from its tokens/s where the source prints them, else from its FLOP/s and convention."""
    peak = peak_dense_flops(result.accelerator, result.workload.matmul_dtype)
    causal = _flops(result, "causal")
    own = result.flops_per_second_per_gpu
    if own is None and result.convention is not None:
        own = _flops(result, result.convention)
    return Rebased(
        flops_per_second_per_gpu=causal,
        mfu=causal / peak if causal is not None and peak else None,
        own_mfu=own / peak if own is not None and peak else None,
    )


def _flops(result: PublishedResult, convention: FlopConvention) -> float | None:
    if result.convention == convention and result.flops_per_second_per_gpu is not None:
        return result.flops_per_second_per_gpu
    shape = result.workload.shape
    if shape is None or result.workload.sequence_tokens is None or result.engine in OTHER_TOKENS:
        return None
    rate = _tokens_per_second_per_gpu(result, shape, result.workload.sequence_tokens)
    return None if rate is None else rate * flop_per_token(shape, result.workload.sequence_tokens, convention)


def _tokens_per_second_per_gpu(result: PublishedResult, shape: ModelShape, sequence_tokens: int) -> float | None:
    """Return the printed rate, or the one that the printed FLOP/s and convention imply."""
    if result.tokens_per_second_per_gpu is not None:
        return result.tokens_per_second_per_gpu
    if result.flops_per_second_per_gpu is None or result.convention is None:
        return None
    return result.flops_per_second_per_gpu / flop_per_token(shape, sequence_tokens, result.convention)
