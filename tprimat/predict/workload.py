"""What a prediction is made for: a model, its layout and batch, and how a framework's layers are implemented.

A framework is described by traits, each with a mechanism that can be read in its code, so that nothing here knows the name of
an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from tprimat.core.models import ModelShape, padded_vocabulary
from tprimat.plan.schema import Layout, RunPlan
from tprimat.records.schema import RunRecord, recompute_words

Precision = Literal["bf16", "fp16", "fp8", "fp32"]
PRECISIONS: Mapping[str, Precision] = {name: name for name in get_args(Precision)}
Attention = Literal["flash", "unfused"]
Optimizer = Literal["one_pass", "fused", "eager"]
Loss = Literal["chunked", "in_place", "compiled_away", "native", "compiled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """How a framework keeps what its backward pass needs. Each trait names the code that decides it."""

    name: str
    """For reports."""
    keeps_gathered_inputs: bool = False
    """Column-parallel layers keep their input as gathered over sequence-parallel ranks, instead of gathering it again."""
    keeps_joint_projection: bool = False
    """Values are a view of the joint projection, which therefore stays whole until the backward pass."""
    attention: Attention = "flash"
    """flash: queries, keys, values, output and one number a row; unfused: the scores as well."""
    loss: Loss = "native"
    """chunked: never whole logits; in_place: Transformer Engine writes the gradient over bf16 logits; compiled_away: the gradient
    beside them, in bf16 too; native: a copy in fp32;
    compiled: two copies in fp32, because a compiled function does not change its argument."""
    loss_chunk_tokens: int = 2048
    """Tokens whose logits exist at once, for chunked."""
    loss_over_tensor_ranks: Loss | None = None
    """Where it differs over several tensor ranks."""
    eager_loss: bool = False
    """The chunks' element-wise parts are not compiled, so that each operation has its own result in fp32."""
    eager_layers: bool = False
    """Norms, residual sums and rotation are not compiled: each operation reads and writes memory (_eager_elements in time.py)."""
    optimizer: Optimizer = "fused"
    """one_pass: Adam scales gradients while it updates; fused: another pass scales them before; eager: Adam is a chain of
    operations, as torch's default is."""
    zeroes_gradients: bool = True
    """Each step sets all gradients to zero first; False: its first products overwrite them, or they are new tensors."""
    fused_activation: bool = True
    """SwiGLU is one function that keeps its argument; False: torch keeps both factors of the product as well."""
    reuses_dummy_gradients: bool = False
    """Transformer Engine hands autograd one dummy gradient a weight shape and keeps it; others allocate one for each product."""
    captures_layers: bool = False
    """A CUDA graph runs each layer and holds dummy gradients of its own."""
    reduces_in_fp32: bool = True
    """Gradients are kept and reduced in fp32; False: in the dtype of the weights."""
    widens_gradients: bool = True
    """The update of fp32 weights first copies all gradients in bf16 to fp32; False: it reads them as they are."""
    accumulates_weight_gradients: bool = True
    """Products add to the fp32 gradients directly."""
    overlaps_tensor_parallel: bool = False
    """A product starts on the piece that is here while the next travels between tensor ranks."""
    overlaps_in_fp8: bool = False
    """Products in fp8 do so, too."""
    balanced_stages: bool = False
    """The last pipeline stage has fewer layers, because its output layer costs as much as several."""
    gathers_keys_values: bool = False
    """Under context parallelism each rank keeps all ranks' keys and values; False: they travel around a ring in both passes."""
    dispatches_once_a_node: bool = False
    """A token travels to a node once, however many of its experts are there (DeepEP and HybridEP, Megatron-Core's dispatcher
    "flex"); False: once for each of its experts ("alltoall")."""
    keeps_returned_rows: bool = False
    """The results of experts are kept as they came back, because the weights of a token's experts are applied there."""
    weighs_experts_in_fp32: bool = False
    """The results of experts are kept in fp32, in which their weights are applied."""
    keeps_fp8_weights_alone: bool = False
    """Under fp8 the layers' matrices are in 8 bits, as they are and transposed, without bf16 beside them (fp8_param_gather)."""
    fp8_output_layer: bool = False
    """Under fp8 the output layer multiplies in 8 bits, too."""
    expert_wgrad_in_bf16: bool = False
    """Under fp8 the experts' weight gradients stay in bf16, and so do the rows that are kept for them."""
    received_rows_step: float = 0.0
    """Buffers of rows for experts are multiples of this part of the rows that a rank sends (LENGTHS in megatron/experts.py)."""
    shards_weights: bool = False
    """FSDP: weights, gradients and states are spread over data-parallel ranks and gathered layer by layer."""
    divides_over_replicas_alone: bool = False
    """It does so with dense models on one pipeline stage and one tensor rank only."""
    late_host_seconds: float = 0.0
    """A step's time per micro-batch and layer under TP2 on two H100, of the slowest run, rounded up, where we think that the GPUs
    waited for the host (docs/measured.md); 0: not known, or launched as CUDA graphs."""
    buffers_bytes: int = 0
    """Workspaces of the matrix libraries, which torch allocates once for each thread that multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Activations that the backward pass computes again, in Megatron-Core's terms."""

    granularity: Literal["none", "selective", "full"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    layers: int = 1
    """uniform: layers between two kept inputs; block: leading layers of each stage or chunk that are recomputed."""
    modules: tuple[str, ...] = ("core_attn",)
    """For selective."""

    @property
    def first_layers(self) -> int | None:
        """Return how many layers of each stage or chunk are computed again; None unless it is a number under full."""
        return self.layers if self.granularity == "full" and self.method == "block" else None

    @property
    def words(self) -> str:
        """Return the granularity, and the number of layers."""
        return recompute_words(self.granularity, self.first_layers) or ""

    def repeats(self, *modules: str) -> bool:
        """Whether all of a layer is computed again, or any of these modules."""
        return self.granularity == "full" or (self.granularity == "selective" and any(one in self.modules for one in modules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step on one machine type."""

    shape: ModelShape
    layout: Layout
    micro_batch: int
    """Sequences."""
    accumulation_steps: int
    """Micro-batches of one replica in a step."""
    sequence_tokens: int
    implementation: Implementation
    precision: Precision = "bf16"
    recompute: Recompute = field(default_factory=Recompute)
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    distributed_optimizer: bool = True
    expert_tensor: int | None = None
    """Ranks that share each expert's matrices; None: as many as the other matrices."""
    vocabulary_rows: int | None = None
    """Rows of the embedding as trained; None: TPrimat's padding."""
    hidden_dropout: bool = False
    attention_dropout: bool = False
    mtp_layers: int = 0
    """Multi-token-prediction layers, on the last stage."""
    chunk_layers: tuple[int, ...] | None = None
    """Layers of each model chunk in the model's order, chunk i on stage i modulo stages; None: equal numbers."""
    interleaved_group: int | None = None
    """Consecutive micro-batches that the interleaved schedule runs through one chunk; None: one for each stage."""
    offloaded: tuple[str, ...] = ()
    """Modules whose activations wait in main memory, as Megatron-Core's --offload-modules names them."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding as trained."""
        return self.vocabulary_rows or padded_vocabulary(self.shape)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, which context parallelism divides."""
        return self.micro_batch * self.sequence_tokens // self.layout.context

    @property
    def sequence_ranks(self) -> int:
        """Ranks among which activations between the matrices are divided along the sequence."""
        return self.layout.tensor if self.layout.sequence_parallel else 1

    @property
    def replicas(self) -> int:
        """Ranks over which the distributed optimizer spreads the states of weights without experts."""
        return self.layout.data * self.layout.context

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.layout.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_replicas(self) -> int:
        """Ranks over which the distributed optimizer spreads the states of experts."""
        layout = self.layout
        return max(1, layout.tensor * layout.context * layout.data // (self.expert_tensor_ranks * layout.expert))

    @property
    def element_bytes(self) -> int:
        """Of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Of a weight's gradient, as it is kept and reduced between replicas."""
        wide = self.implementation.reduces_in_fp32 and self.optimizer_states == "fp32"
        return 4 if wide else self.element_bytes

    @property
    def loss(self) -> Loss:
        """How the loss is computed over this many tensor ranks."""
        code = self.implementation
        return code.loss_over_tensor_ranks if code.loss_over_tensor_ranks and self.layout.tensor > 1 else code.loss

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks train on."""
        return self.micro_batch * self.accumulation_steps * self.layout.data * self.sequence_tokens


def workload_of_plan(plan: RunPlan, implementation: Implementation) -> Workload | None:
    """Return the workload of a plan; None where its micro-batch is not known yet."""
    batch = plan.batch
    if not isinstance(batch.micro_batch_sequences, int) or batch.accumulation_steps is None:
        return None
    return Workload(
        shape=plan.shape,
        layout=plan.layout,
        micro_batch=batch.micro_batch_sequences,
        accumulation_steps=batch.accumulation_steps,
        sequence_tokens=batch.sequence_tokens,
        implementation=implementation,
        expert_tensor=1 if plan.shape.experts else None,
        precision=plan.precision,
        recompute=_recompute(plan.recompute, plan.recompute_modules, plan.recompute_layers),
        optimizer_states=plan.engine_options.optimizer_states,
        distributed_optimizer=plan.engine_options.distributed_optimizer,
    )


def _recompute(granularity: Literal["none", "selective", "full"], modules: tuple[str, ...], layers: int | None) -> Recompute:
    if granularity == "full" and layers is not None:
        return Recompute(granularity="full", method="block", layers=layers)
    return Recompute(granularity=granularity, modules=modules) if modules else Recompute(granularity=granularity)


def layout_of_record(run: RunRecord) -> Layout | None:
    """Return how a run was divided; None where its record does not say."""
    degrees = (run.tensor_parallel, run.pipeline_parallel, run.data_parallel)
    if None in degrees:
        return None
    tensor, pipeline, data = (degree or 1 for degree in degrees)
    seen = run.evidence.sequence_parallel if run.evidence is not None else None
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=run.virtual_pipeline,
        context=run.context_parallel or 1,
        expert=run.expert_parallel or 1,
        data=data,
        sequence_parallel=tensor > 1 if seen is None else seen,
    )


def workload_of_record(run: RunRecord, layout: Layout, implementation: Implementation) -> Workload | None:
    """Return the workload of a run that was measured; None where its record does not say all of it."""
    micro, steps, tokens = run.micro_batch_sequences, run.accumulation_steps, run.sequence_tokens
    precision = PRECISIONS.get(run.matmul_dtype or "")
    if run.shape is None or micro is None or not steps or tokens is None or precision is None:
        return None
    options = run.engine_options
    return Workload(
        shape=run.shape,
        layout=layout,
        micro_batch=micro,
        accumulation_steps=steps,
        sequence_tokens=tokens,
        implementation=implementation,
        expert_tensor=1 if run.shape.experts else None,
        precision=precision,
        recompute=_recompute(run.recompute or "none", run.recompute_modules, run.recompute_layers),
        optimizer_states="bf16" if options.get("optimizer_states") == "bf16" else "fp32",
        distributed_optimizer=options.get("distributed_optimizer") is not False,
    )


# The implementations that TPrimat starts, and those whose logs it reads.

CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""torch's default on Hopper and newer (at::cuda::getChosenWorkspaceSize), for each handle."""
THREADS_THAT_MULTIPLY = 2
"""The forward pass's thread and autograd's."""
WORKSPACES = CUBLAS_WORKSPACE_BYTES * THREADS_THAT_MULTIPLY

EMBEDDED = Implementation(
    name="embedded",
    keeps_gathered_inputs=True,
    loss="chunked",
    optimizer="one_pass",
    zeroes_gradients=False,
    overlaps_tensor_parallel=True,
    balanced_stages=True,
    gathers_keys_values=True,
    keeps_returned_rows=True,
    widens_gradients=False,
    expert_wgrad_in_bf16=True,
    received_rows_step=1 / 16,
    late_host_seconds=9e-3,
    buffers_bytes=WORKSPACES,
)
"""tprimat/megatron with its own layers, all switches on."""
TRANSFORMER_ENGINE = Implementation(
    name="Megatron-Core with Transformer Engine",
    loss="native",
    reuses_dummy_gradients=True,
    late_host_seconds=10e-3,
    buffers_bytes=2 * WORKSPACES,
)
"""Megatron-LM and Primus with Transformer Engine's layers; Transformer Engine has workspaces of its own."""
MEGATRON_LOCAL = Implementation(
    name="Megatron-Core without Transformer Engine",
    loss="native",
    attention="unfused",
    keeps_joint_projection=True,
    buffers_bytes=WORKSPACES,
)
"""Megatron-LM's local layers."""
MEGATRON_TUNED = replace(
    TRANSFORMER_ENGINE,
    loss="in_place",
    dispatches_once_a_node=True,
    overlaps_tensor_parallel=True,
    overlaps_in_fp8=True,
    late_host_seconds=0.0,
)
"""Megatron-LM as NVIDIA trains large models with it: a fused loss, tp_comm_overlap, and DeepEP or HybridEP between the experts'
ranks (Megatron-LM's README; src/megatron/bridge/perf_recipes of Megatron-Bridge)."""
NEMO = replace(TRANSFORMER_ENGINE, name="NeMo with Transformer Engine", keeps_fp8_weights_alone=True, late_host_seconds=0.0)
"""NeMo's recipes."""
NEMO_ON_TORCH = replace(
    MEGATRON_LOCAL,
    name="NeMo without Transformer Engine",
    attention="flash",
    loss="compiled",
    eager_layers=True,
    optimizer="eager",
    accumulates_weight_gradients=False,
)
"""NeMo's recipes on torch alone."""
FSDP = Implementation(
    name="FSDP2",
    loss="compiled_away",
    loss_over_tensor_ranks="compiled",
    shards_weights=True,
    zeroes_gradients=False,
    weighs_experts_in_fp32=True,
    accumulates_weight_gradients=False,
    keeps_gathered_inputs=True,
    buffers_bytes=WORKSPACES,
)
"""torchtitan, compiled; over tensor ranks its loss is computed on DTensors in fp32, which compilation does not fuse."""
