"""The matrix products of the models that TPrimat trains, as one tensor-parallel rank runs them in a forward pass."""

from dataclasses import dataclass, replace
from functools import partial

from tprimat.facts.flops import gemm_shapes
from tprimat.facts.models import ModelShape, model_shape, tiny
from tprimat.probe.case import Case
from tprimat.probe.gemm import FP8_CALLS, Product, prepare, settings

KIND = "model_gemm"
DTYPES = ("bf16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model under the splits that its strategies use."""

    model: str
    """Key under which it is shown."""
    shape: ModelShape
    tensor_parallel: tuple[int, ...] = (1, 2, 4)
    micro_batch: int = 4
    sequence: int = 2048


DEFAULT_WORKLOADS = (
    Workload(model="llama", shape=model_shape("llama-3.1-8b")),
    Workload(model="qwen", shape=model_shape("qwen-2.5-7b")),
)


def shrunk(workload: Workload) -> Workload:
    """For a processor."""
    return replace(workload, shape=tiny(workload.shape), micro_batch=1, sequence=64)


def workload_cases(workload: Workload, dtype: str) -> list[Case]:
    """Every matrix at every split."""
    call = FP8_CALLS[0] if dtype == "fp8" else "F.linear"
    found = []
    for ranks in workload.tensor_parallel:
        for matrix in gemm_shapes(workload.shape, workload.micro_batch, workload.sequence, ranks):
            product = Product(m=matrix.m, k=matrix.k, n=matrix.n)
            found.append(
                Case(
                    kind=KIND,
                    variant=f"{workload.model} {matrix.name}",
                    shape={**product.shape, "tensor_parallel": ranks},
                    dtype=dtype,
                    flop=product.flop,
                    prepare=partial(prepare, product, dtype, call),
                    within=partial(settings, dtype),
                )
            )
    return found


def cases(workloads: tuple[Workload, ...], dtypes: tuple[str, ...], *, small: bool) -> list[Case]:
    """All models, in the dtypes that training uses."""
    return [
        case
        for dtype in DTYPES
        if dtype in dtypes
        for workload in workloads
        for case in workload_cases(shrunk(workload) if small else workload, dtype)
    ]
