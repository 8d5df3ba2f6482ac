"""What one training step works on and how it is divided: the one set of facts that plans, records, logs and predictions share.

A plan has a workload (what was asked for); a record has two, what was asked for and what was seen; a prediction takes one; a
published row is one with a result. Comparing runs is comparing workloads field by field.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field

from tprimat.core.errors import RecordError
from tprimat.core.flops import parameters
from tprimat.core.implementations import Implementation, LossKind
from tprimat.core.limits import LARGEST_REAL, Count, Name, WholeNumber
from tprimat.core.models import ModelShape, padded_vocabulary
from tprimat.core.rows import DATA, RefuseUnknownKeys, document

W = TypeVar("W", bound="Workload")

Precision = Literal["bf16", "fp16", "fp8", "fp4", "fp32"]
"""Matmul dtypes that memory and time are predicted of."""
PRECISIONS: Mapping[str, Precision] = {name: name for name in get_args(Precision)}
RecomputeGranularity = Literal["none", "selective", "full"]
Routing = Literal["natural", "balanced", "biased"]
"""How tokens choose experts: by the router, at random, which gives all experts about as many (as Megatron-Core forces it), or
with a random preference for some of them."""
ExpertCapacity = Annotated[float, Field(gt=0, le=LARGEST_REAL, allow_inf_nan=False)] | Literal["unlimited"]
"""What an expert takes of a rank's micro-batch, times the mean of all experts; more is dropped."""
Fp8Scaling = Literal["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4", "mxfp4"]
NARROW_BYTES: Mapping[str, float] = document(DATA / "precisions.yaml")["bytes"]
FORMATS: Mapping[str, tuple[Precision, Fp8Scaling | None]] = {
    name: (dtype, scaling) for name, (dtype, scaling) in document(DATA / "precisions.yaml")["formats"].items()
}
"""What people call a precision -> the dtype of the products, and how it scales."""
HALF = frozenset({"bf16", "bfloat16", "fp16", "float16"})
MOMENTS_IN_BF16 = "fp32 with moments in bf16"
"""Optimizer states of Megatron-Core's precision-aware optimizer as NVIDIA's recipes for mixtures set it."""
KEPT_FREE = 0.05
"""Share of the memory that a search for a micro-batch leaves for fragments and later allocations of libraries."""
ATTENTION_ALONE = ("core_attn",)
"""What is computed again under selective recomputation that names no module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one model is split over ranks; the view of a workload for code that needs every degree."""

    tensor: int = 1
    pipeline: int = 1
    """Stages that share the layers."""
    virtual_pipeline: int | None = None
    """Model chunks on each stage; None without interleaving."""
    context: int = 1
    expert: int = 1
    data: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Return the number of all ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def chunks(self) -> int:
        """Return over how many model chunks, of all stages, the layers are divided."""
        return self.pipeline * (self.virtual_pipeline or 1)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields of a workload that it stands for."""
        return {name: getattr(self, attribute) for name, attribute in DEGREES.items()}


DEGREES: Mapping[str, str] = {
    "tensor_parallel": "tensor",
    "pipeline_parallel": "pipeline",
    "virtual_pipeline": "virtual_pipeline",
    "context_parallel": "context",
    "expert_parallel": "expert",
    "data_parallel": "data",
    "sequence_parallel": "sequence_parallel",
}
"""Field of a workload -> field of its layout."""
SHORT_NAMES: Mapping[str, str] = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline",
    "cp": "context_parallel",
    "ep": "expert_parallel",
}
"""Of the degrees that a layout chooses, as options and words have them -> field of a workload."""


@dataclass(frozen=True, kw_only=True)
class Workload(RefuseUnknownKeys):
    """What is known of the work of a training step. None: not known."""

    shape: ModelShape | None = None
    tensor_parallel: Count | None = None
    pipeline_parallel: Count | None = None
    virtual_pipeline: Count | None = None
    """Model chunks on each pipeline stage; None also without interleaving."""
    context_parallel: Count | None = None
    expert_parallel: Count | None = None
    expert_tensor_parallel: Count | None = None
    """Ranks that share each expert's matrices; None: as many as the other matrices."""
    data_parallel: Count | None = None
    sequence_parallel: bool | None = None
    weights_split_over: Count | None = None
    """Replicas that have a part each of every weight (FSDP, ZeRO-3); 1: each has all of its weights."""
    distributed_optimizer: bool | None = None
    chunk_layers: tuple[WholeNumber, ...] | None = None
    """Layers of each model chunk in the model's order, chunk i on stage i modulo stages; None: the framework's own split."""
    interleaved_group: Count | None = None
    """Consecutive micro-batches that the interleaved schedule runs through one chunk; None: one for each stage."""
    micro_batch_sequences: Count | None = None
    global_batch_sequences: Count | None = None
    sequence_tokens: Count | None = None
    documents: Name | None = None
    """packed: a sequence holds several documents, at whose ends attention ends; padded: not every token is one of a document."""
    matmul_dtype: Name | None = None
    """What the matrix units run: bf16, fp8, fp16, tf32, fp32."""
    fp8_scaling: Fp8Scaling | None = None
    """What a value is divided by before it is rounded to 8 or 4 bits: the largest of its tensor in earlier steps (delayed) or now
    (current), or of its row or block. As in Megatron-Core's fp8_recipe, where current is called tensorwise."""
    output_layer_dtype: str | None = None
    """fp8 if the output layer multiplies in 8 bits as well, which usual recipes leave in bf16."""
    attention_dtype: str | None = None
    """fp8 if attention multiplies in 8 bits as well, which usual recipes leave in bf16."""
    narrow_weights_alone: bool | None = None
    """Under fp8 or fp4, the layers' matrices are kept only in that dtype, without bf16; None: as the implementation does."""
    layers_in_bf16: WholeNumber | None = None
    """Layers that a recipe for fp8 leaves in bf16, as some do with the first and the last."""
    wider_parts: tuple[Name, ...] | None = None
    """What else a recipe for fp8 or fp4 leaves in a wider dtype, such as weight gradients, in words."""
    parameter_dtype: str | None = None
    """Of the weights in the matmuls of the forward pass, such as 'bfloat16'."""
    gradient_dtype: str | None = None
    sums_in_fp32: bool | None = None
    """Replicas send each other gradients as they are and sum them in fp32, Megatron-Core's reduce_scatter_with_fp32_accumulation:
    what they receive is a copy of all of them, until the backward pass has ended."""
    optimizer: str | None = None
    optimizer_states: Name | None = None
    """Dtype of master weights and moments, such as 'fp32' or 'fp32 with moments in bf16'."""
    recompute: RecomputeGranularity | None = None
    """Activations that the backward pass computes again, in Megatron-Core's terms."""
    recompute_modules: tuple[Name, ...] | None = None
    """Under selective, in alphabetical order."""
    recompute_layers: Count | None = None
    """Under full, the first layers of each pipeline stage, or of each chunk of one; None: all of them."""
    recompute_every: Count | None = None
    """Under full with all layers, the layers between two kept inputs; None: one (Megatron-Core's method uniform)."""
    offloaded: tuple[Name, ...] | None = None
    """Modules whose activations wait in main memory, as Megatron-Core's --offload-modules names them."""
    routing: Routing | None = None
    """Of tokens to experts, which decides how even the load is; None also in a model without any."""
    expert_capacity: ExpertCapacity | None = None
    attention: str | None = None
    hidden_dropout: bool | None = None
    attention_dropout: bool | None = None
    vocabulary_rows: Count | None = None
    """Rows of the embedding as trained; None: TPrimat's padding."""
    mtp_layers: WholeNumber | None = None
    data: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return what is known, by field."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def over(self: W, other: "Workload") -> W:
        """Return this workload, with what it does not know from another."""
        return type(self)(**{**other.facts, **self.facts})

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches of one replica in a step; None until all of it is known."""
        batch, micro, replicas = self.global_batch_sequences, self.micro_batch_sequences, self.data_parallel
        return None if batch is None or micro is None or replicas is None else batch // (micro * replicas)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step over all ranks."""
        batch, tokens = self.global_batch_sequences, self.sequence_tokens
        return None if batch is None or tokens is None else batch * tokens

    def layout_words(self, ones: Collection[str] = ("tp", "pp", "dp")) -> str:
        """Return the degrees that are known, such as TP4 PP2 DP1; those of 1 only where `ones` has them."""
        degrees = {name: getattr(self, field) for name, field in (*SHORT_NAMES.items(), ("dp", "data_parallel"))}
        return " ".join(f"{name.upper()}{size}" for name, size in degrees.items() if size and (size > 1 or name in ones))

    @property
    def recompute_words(self) -> str | None:
        """Return what is computed again, with the layers under full and the modules under selective, unless attention alone."""
        layers, modules = self.recompute_layers, self.recompute_modules
        if self.recompute == "full" and layers is not None:
            return f"full (first {'layer' if layers == 1 else f'{layers} layers'})"
        if self.recompute == "selective" and tuple(modules or ()) not in {(), ATTENTION_ALONE}:
            return f"selective ({', '.join(modules or ())})"
        return self.recompute

    def repeats(self, *modules: str) -> bool:
        """Whether the backward pass computes all of a layer again, or any of these modules."""
        again = self.recompute_modules or ATTENTION_ALONE
        return self.recompute == "full" or (self.recompute == "selective" and any(one in again for one in modules))


@dataclass(frozen=True, kw_only=True)
class FullWorkload(Workload):
    """A workload of which everything is known that memory and time depend on: what a plan asks for and a prediction takes."""

    shape: ModelShape
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    context_parallel: Count = 1
    expert_parallel: Count = 1
    data_parallel: Count = 1
    sequence_parallel: bool = False
    weights_split_over: Count = 1
    distributed_optimizer: bool = True
    global_batch_sequences: Count
    sequence_tokens: Count
    matmul_dtype: Precision = "bf16"
    optimizer_states: Name = "fp32"
    recompute: RecomputeGranularity = "none"
    implementation: Annotated[Implementation | None, Field(exclude=True)] = None
    """How the framework's layers are implemented; in no file, since engine and options decide it."""

    @classmethod
    def of(cls, layout: Layout, *, micro_batch: int, accumulation_steps: int, **facts: Any) -> "FullWorkload":
        """Return the workload of a layout that runs so many micro-batches of so many sequences on each replica."""
        batch = micro_batch * accumulation_steps * layout.data
        return cls(**layout.facts, micro_batch_sequences=micro_batch, global_batch_sequences=batch, **facts)

    def changed(self: W, **facts: Any) -> W:
        """Return a copy with other facts: as replace() does, a tenth of the time, since a search tries thousands of layouts."""
        copy: W = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **facts)
        if not DEGREES.keys().isdisjoint(facts):
            copy.__dict__.pop("layout", None)
        if "implementation" in facts:
            copy.__dict__.pop("code", None)
        return copy

    @cached_property
    def layout(self) -> Layout:
        """How the model is split."""
        return Layout(**{attribute: getattr(self, name) for name, attribute in DEGREES.items()})

    @cached_property
    def code(self) -> Implementation:
        """How the framework's layers are implemented, which must be given."""
        if self.implementation is None:
            raise RecordError("A prediction needs to know how the framework's layers are implemented.")
        return self.implementation

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.layout.world_size

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch; an error where the run has to find it."""
        if self.micro_batch_sequences is None:
            raise RecordError("A prediction needs the micro-batch.", fix="--micro-batch-size 1")
        return self.micro_batch_sequences

    @property
    def accumulation(self) -> int:
        """Micro-batches of one replica in a step."""
        return self.global_batch_sequences // (self.micro_batch * self.data_parallel)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks."""
        return self.global_batch_sequences * self.sequence_tokens

    @property
    def expert_capacity_factor(self) -> float | None:
        """What an expert takes, times the mean of all; None: it drops no token."""
        return self.expert_capacity if isinstance(self.expert_capacity, float | int) else None

    @property
    def parameters(self) -> int:
        """Trained weights over all ranks, each counted once, with the rows that pad the vocabulary."""
        return parameters(replace(self.shape, vocabulary=padded_vocabulary(self.shape))).total

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding as trained."""
        return self.vocabulary_rows or padded_vocabulary(self.shape)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, which context parallelism divides."""
        return self.micro_batch * self.sequence_tokens // self.context_parallel

    @property
    def sequence_ranks(self) -> int:
        """Ranks among which activations between the matrices are divided along the sequence."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def replicas(self) -> int:
        """Ranks over which the distributed optimizer spreads the states of weights without experts."""
        return self.data_parallel * self.context_parallel

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def expert_replicas(self) -> int:
        """Ranks over which the distributed optimizer spreads the states of experts."""
        ranks = self.tensor_parallel * self.context_parallel * self.data_parallel
        return max(1, ranks // (self.expert_tensor_ranks * self.expert_parallel))

    @property
    def element_bytes(self) -> int:
        """Of an activation."""
        return 4 if self.matmul_dtype == "fp32" else 2

    @property
    def format(self) -> str:
        """What its precision is called: a key of FORMATS, or fp32."""
        scaled = next((name for name, (_, scaling) in FORMATS.items() if scaling and scaling == self.fp8_scaling), None)
        return scaled if scaled and self.narrow else self.matmul_dtype

    @property
    def narrow(self) -> bool:
        """Whether layers multiply in 8 or 4 bits."""
        return self.matmul_dtype in {"fp8", "fp4"}

    @property
    def narrow_bytes(self) -> float:
        """Of a number that is kept for a product, where layers multiply in 8 or 4 bits."""
        return NARROW_BYTES.get(self.fp8_scaling or "", NARROW_BYTES[self.matmul_dtype])

    @property
    def gradient_bytes(self) -> int:
        """Of a weight's gradient, as it is kept and reduced between replicas."""
        if self.gradient_dtype is not None and not self.code.shards_weights:
            return 2 if self.gradient_dtype in HALF else 4
        wide = self.code.reduces_in_fp32 and self.optimizer_states == "fp32"
        return 4 if wide else self.element_bytes

    @property
    def loss(self) -> LossKind:
        """How the loss is computed over this many tensor ranks."""
        code = self.code
        return code.loss_over_tensor_ranks if code.loss_over_tensor_ranks and self.tensor_parallel > 1 else code.loss


# What the embedded engine can launch as CUDA graphs.

Obstacle = Literal["virtual", "pipeline", "context", "experts", "recompute", "fully_shard", "fp8"]


def graph_obstacle(work: Workload, *, fully_shard: bool, own_layers: bool) -> Obstacle | None:
    """Return the first reason why micro-batches cannot be launched as CUDA graphs, or have never been; None if they can."""
    reasons: dict[Obstacle, bool] = {
        "virtual": (work.virtual_pipeline or 1) > 1,
        "pipeline": (work.pipeline_parallel or 1) > 1 and not own_layers,
        "context": (work.context_parallel or 1) > 1,
        "experts": work.shape is not None and work.shape.experts is not None,
        "recompute": (work.recompute or "none") != "none",
        "fully_shard": fully_shard,
        "fp8": work.matmul_dtype == "fp8" and not own_layers,
    }
    return next((name for name, applies in reasons.items() if applies), None)
