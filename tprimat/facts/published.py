"""Training speeds and model sizes that others published, kept as printed, and what they mean by one yardstick.

Sources count FLOP in three ways and divide by dense or sparse peaks. Here each figure stays as its source prints it, with
its convention; `rebase` turns it into the `causal` convention against the dense peak.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tprimat.facts.accelerator import Dtype
from tprimat.facts.accelerators import peak_dense_flops
from tprimat.facts.flops import FlopConvention, flop_per_token
from tprimat.facts.models import MODELS, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedResult:
    """One training run as its source reports it. None: the source does not say."""

    name: str
    """Ours, unique."""
    source: str
    """URL, arXiv number or title of the page."""
    date: str | None
    """Year and month."""
    engine: str | None
    accelerator: str | None
    """Device name for facts.accelerators; None when the GPU is not one of the table."""
    gpus: int | None
    model: str
    """As the source calls it."""
    shape: str | None
    """Key in MODELS; None when the table has no such model."""
    dtype: str | None
    """Of the matmuls."""
    sequence_tokens: int | None = None
    micro_batch_sequences: int | None = None
    global_batch_sequences: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None
    tokens_per_second_per_gpu: float | None = None
    flops_per_second_per_gpu: float | None = None
    """As printed, in `convention`."""
    mfu: float | None = None
    """As printed, a fraction of `peak_flops` in `convention`."""
    convention: FlopConvention | None = None
    peak_flops: float | None = None
    """What the source divided by."""
    notes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebased:
    """A published result by one yardstick; None where it does not say enough."""

    flops_per_second_per_gpu: float | None
    """`causal` convention."""
    mfu: float | None
    """Of the dense peak, `causal` convention."""
    own_mfu: float | None
    """Of the dense peak, in the convention of the source: what differs from the printed MFU is an error or another peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSize:
    """Parameters of a model as a source prints them."""

    shape: str
    source: str
    total: float
    active: float | None = None
    """Of one token."""
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
    """Device name for facts.accelerators."""
    source: str
    peak_flops: Mapping[Dtype, float]
    """By dtype."""
    bandwidth_bytes_per_second: float
    link_bytes_per_second: float


def rebase(result: PublishedResult) -> Rebased:
    """From tokens/s where the source prints them, else from its FLOP/s and convention."""
    peak = peak_dense_flops(result.accelerator, result.dtype)
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
    if result.shape is None or result.sequence_tokens is None:
        return None
    shape = MODELS[result.shape]
    rate = tokens_per_second_per_gpu(result, shape, result.sequence_tokens)
    return None if rate is None else rate * flop_per_token(shape, result.sequence_tokens, convention)


def tokens_per_second_per_gpu(result: PublishedResult, shape: ModelShape, sequence_tokens: int) -> float | None:
    """As printed, or worked back from FLOP/s in the convention of the source."""
    if result.tokens_per_second_per_gpu is not None:
        return result.tokens_per_second_per_gpu
    if result.flops_per_second_per_gpu is None or result.convention is None:
        return None
    return result.flops_per_second_per_gpu / flop_per_token(shape, sequence_tokens, result.convention)
